// SPDX-License-Identifier: MIT
// LU factors on the CPU. Small matrices are factored side by side, one per lane; large ones by
// LAPACK.

#include "lu.h"

#include <tuple>

#include "../common/aten.h"
#include "../common/policy.h"
#include "expect.h"

namespace metalcore::cpu {
namespace {

using lanes::at;
using lanes::LU;
using simd::kLanes;
using simd::Vec;

// Largest side that is factored side by side,
const Knob interleaved_up_to("lu", "interleaved_up_to", 128);
// and for a single matrix, times their number for a few: lanes are idle then.
const Knob interleaved_alone_up_to("lu", "interleaved_alone_up_to", 48);

using Factors = std::tuple<Tensor, Tensor, Tensor>;

// Columns `from` to `to` of row i of the factors into row i of `count` matrices of `columns`
// columns. On the left stand zeros, as many as `from`; on the right the diagonal of L, and zeros.
template <typename T>
void write_row(const LU<T>& lu, int64_t i, int64_t from, int64_t to, int64_t columns,
               int64_t stride, int64_t count, T* row, T* out) {
  for (int64_t j = 0; j < columns; ++j) {
    at(row, j) = j < from || j >= to ? Vec<T>{} : at(lu.row(i), j);
  }
  if (from == 0 && to < columns) at(row, to) = lanes::splat<T>(1);
  lanes::unpack(row, columns, stride, count, out);
}

template <typename T>
void lu_interleaved(const Tensor& A, const Factors& factors) {
  const int64_t m = A.size(-2), n = A.size(-1), k = std::min(m, n);
  const int64_t batch = m == 0 ? 0 : std::get<0>(factors).numel() / (m * m);
  const T* a = data<T>(A);
  T* p = mutable_data<T>(std::get<0>(factors));
  T* l = mutable_data<T>(std::get<1>(factors));
  T* u = mutable_data<T>(std::get<2>(factors));
  lanes::for_each_group<T>(batch, m * n * k, [&](int64_t first, int64_t count) {
    LU<T> lu(m, n);
    T* row = lu.place(lanes::workspace<T>((lu.size() + n) * kLanes<T>));
    lanes::factor(lu, a + first * m * n, count);
    std::fill_n(p + first * m * m, count * m * m, T(0));
    for (int64_t i = 0; i < m; ++i) {
      write_row(lu, i, 0, std::min(i, k), k, m * k, count, row, l + (first * m + i) * k);
      if (i < k) write_row(lu, i, i, n, n, k * n, count, row, u + (first * k + i) * n);
      for (int64_t c = 0; c < count; ++c) p[((first + c) * m + lu.order[i][c]) * m + i] = 1;
    }
  });
}

Factors lu(const Tensor& A_in) {
  expect_matrices("lu", A_in);
  const Tensor A = dense(to_dtype(A_in, accumulate_dtype(A_in.scalar_type())));
  const int64_t m = A.size(-2), n = A.size(-1), k = std::min(m, n);
  Tensor P, L, U;
  if (lanes::fit(A, interleaved_up_to, interleaved_alone_up_to)) {
    metalcore_variant = "interleaved";
    const auto sized = [&](int64_t rows, int64_t columns) {
      std::vector<int64_t> sizes = A.sizes().vec();
      sizes[sizes.size() - 2] = rows;
      sizes.back() = columns;
      return cpu::empty(sizes.data(), sizes.size(), A.scalar_type());
    };
    std::tie(P, L, U) = Factors(sized(m, m), sized(m, k), sized(k, n));
    if (A.scalar_type() == ScalarType::Double) {
      lu_interleaved<double>(A, {P, L, U});
    } else {
      lu_interleaved<float>(A, {P, L, U});
    }
  } else {
    metalcore_variant = "lapack";
    const auto found = aten<3>("aten::linalg_lu", "", A, true);
    std::tie(P, L, U) = Factors(dense(found[0]), dense(found[1]), dense(found[2]));
  }
  const ScalarType dtype = A_in.scalar_type();
  return {to_dtype(P, dtype), to_dtype(L, dtype), to_dtype(U, dtype)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) { m.impl("lu", kernel<&lu>); }

}  // namespace metalcore::cpu
