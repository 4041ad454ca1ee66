// SPDX-License-Identifier: MIT
// Determinants on the CPU, as products of pivots. Small matrices are factored side by side, one per
// lane; large ones by LAPACK.

#include <tuple>

#include "../common/aten.h"
#include "../common/policy.h"
#include "expect.h"
#include "lu.h"

namespace metalcore::cpu {
namespace {

using lanes::LU;
using simd::kLanes;

// Largest N that is factored side by side,
const Knob interleaved_up_to("det", "interleaved_up_to", 128);
// and for a single matrix, times their number for a few: lanes are idle then.
const Knob interleaved_alone_up_to("det", "interleaved_alone_up_to", 56);

using Results = std::tuple<Tensor, Tensor, Tensor>;

template <typename T>
struct Out {
  T *det, *sign, *logarithm;

  explicit Out(const Results& r)
      : det(mutable_data<T>(std::get<0>(r))),
        sign(mutable_data<T>(std::get<1>(r))),
        logarithm(mutable_data<T>(std::get<2>(r))) {}
};

// det, sign and log |det| of one matrix, from n pivots. Their exponents are added up apart, so that
// no product of some leaves the range of numbers if that of all is in it.
template <typename T, typename Pivot>
void write(int64_t matrix, int64_t n, bool odd, const Out<T>& out, Pivot pivot) {
  double product = odd ? -1 : 1;
  int exponent = 0;
  for (int64_t i = 0; i < n; ++i) {
    int of_pivot, of_product;
    product = std::frexp(product * std::frexp(double(pivot(i)), &of_pivot), &of_product);
    exponent += of_pivot + of_product;
  }
  const bool is_number = !std::isnan(product);
  out.det[matrix] = T(std::ldexp(product, exponent));
  out.sign[matrix] = is_number ? T((product > 0) - (product < 0)) : T(product);
  out.logarithm[matrix] = T(std::log(std::abs(product)) + exponent * 0.69314718055994530942);
}

template <typename T>
void det_interleaved(const Tensor& A, int64_t batch, const Results& results) {
  const int64_t n = A.size(-1);
  const T* a = data<T>(A);
  const Out<T> out(results);
  lanes::for_each_group<T>(batch, n * n * (n / 3 + 8), [&](int64_t first, int64_t count) {
    LU<T> lu(n, n);
    lu.place(lanes::workspace<T>(lu.size() * kLanes<T>));
    lanes::factor(lu, a + first * n * n, count);
    for (int64_t c = 0; c < count; ++c) {
      write<T>(first + c, n, lu.odd[c] != 0, out,
               [&](int64_t i) { return lanes::at(lu.row(i), i)[c]; });
    }
  });
}

template <typename T>
void det_lapack(const Tensor& A, int64_t batch, const Results& results) {
  // the determinant of A^T, whose columns are the rows of A: no transposed copy
  const auto [packed, pivots, info] =
      aten<3>("aten::linalg_lu_factor_ex", "", torch::stable::transpose(A, -2, -1), true, false);
  const int64_t n = A.size(-1);
  const Tensor factors = dense(torch::stable::transpose(packed, -2, -1)), swaps = dense(pivots);
  const T* u = data<T>(factors);
  const int32_t* swapped = data<int32_t>(swaps);
  const Out<T> out(results);
  for (int64_t b = 0; b < batch; ++b) {
    bool odd = false;
    for (int64_t i = 0; i < n; ++i) odd ^= swapped[b * n + i] != i + 1;
    write<T>(b, n, odd, out, [&](int64_t i) { return u[b * n * n + i * (n + 1)]; });
  }
}

Results det(const Tensor& A_in) {
  expect_square("det", A_in);
  const Tensor A = dense(to_dtype(A_in, accumulate_dtype(A_in.scalar_type())));
  const auto scalar = [&] { return cpu::empty(A.sizes().data(), A.dim() - 2, A.scalar_type()); };
  const Results results = {scalar(), scalar(), scalar()};
  const auto& [value, sign, logarithm] = results;
  const bool in_lanes = lanes::fit(A, interleaved_up_to, interleaved_alone_up_to);
  metalcore_variant = in_lanes ? "interleaved" : "lapack";
  if (A.scalar_type() == ScalarType::Double) {
    (in_lanes ? det_interleaved<double> : det_lapack<double>)(A, value.numel(), results);
  } else {
    (in_lanes ? det_interleaved<float> : det_lapack<float>)(A, value.numel(), results);
  }
  const ScalarType dtype = A_in.scalar_type();
  return {to_dtype(value, dtype), to_dtype(sign, dtype), to_dtype(logarithm, dtype)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) { m.impl("det", kernel<&det>); }

}  // namespace metalcore::cpu
