// SPDX-License-Identifier: MIT
// Cholesky on the CPU. Small matrices are factored side by side, one per lane, by blocks of
// columns in registers; large ones by LAPACK.

#include <tuple>

#include "../common/aten.h"
#include "../common/policy.h"
#include "expect.h"
#include "triangular.h"

namespace metalcore::cpu {
namespace {

using lanes::at;
using lanes::Mask;
using lanes::splat;
using simd::kLanes;
using simd::Vec;

// Largest N that is factored side by side, for three matrices and more,
const Knob interleaved_up_to("cholesky", "interleaved_up_to", 256);
// and for fewer, where most lanes are idle.
const Knob interleaved_alone_up_to("cholesky", "interleaved_alone_up_to", 8);

// Columns that are factored at once, and rows of a tile below them: its sums, the values of as many
// rows and one more fill the registers.
constexpr int kRows = 4;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kColumns = 4;
#else
constexpr int kColumns = 3;
#endif

// The block on the diagonal of C columns: l_jk below the diagonal, 1 / l_jj on it.
template <typename T, int C>
struct Diagonal {
  Vec<T> l[C][C];
};

// Factors rows and columns J.. of the block on the diagonal, from the columns before them. `info`
// keeps the first failure.
template <typename T, int C>
inline Diagonal<T, C> factor_diagonal(T* w, int64_t n, int64_t ld, int64_t J, Mask<T>& info) {
  Diagonal<T, C> d;
  T* rows = w + J * ld * kLanes<T>;
#pragma GCC unroll 8
  for (int i = 0; i < C; ++i) {
    for (int j = 0; j <= i; ++j) d.l[i][j] = at(rows, i * ld + J + j);
  }
  for (int64_t k = 0; k < J; ++k) {
    Vec<T> b[C];
    for (int j = 0; j < C; ++j) b[j] = at(rows, j * ld + k);
    for (int i = 0; i < C; ++i) {
      for (int j = 0; j <= i; ++j) d.l[i][j] -= b[i] * b[j];
    }
  }
  // without it the block stays in memory
#pragma GCC unroll 8
  for (int j = 0; j < C; ++j) {
    const Vec<T> s = d.l[j][j];
    info = ((info == 0) & !(s > 0)) ? Mask<T>{} + lanes::Int<T>(J + j + 1) : info;
    const Vec<T> root = lanes::sqrt(s);
    at(rows, j * ld + J + j) = root;
    d.l[j][j] = splat<T>(1) / root;
#pragma GCC unroll 8
    for (int i = j + 1; i < C; ++i) {
      d.l[i][j] *= d.l[j][j];
      at(rows, i * ld + J + j) = d.l[i][j];
      for (int k = j + 1; k <= i; ++k) d.l[i][k] -= d.l[i][j] * d.l[k][j];
    }
    // what unpack_triangle takes along
    const int64_t end = std::min(n, (J + j) / kLanes<T> * kLanes<T> + kLanes<T>);
    for (int64_t k = J + j + 1; k < end; ++k) at(rows, j * ld + k) = Vec<T>{};
  }
  return d;
}

// R rows I.. below the block.
template <typename T, int R, int C>
inline void factor_tile(T* w, int64_t ld, int64_t I, int64_t J, const Diagonal<T, C>& d) {
  Vec<T> c[R][C];
  T* rows = w + I * ld * kLanes<T>;
  const T* above = w + J * ld * kLanes<T>;
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < C; ++j) c[i][j] = at(rows, i * ld + J + j);
  }
  for (int64_t k = 0; k < J; ++k) {
    Vec<T> b[C];
    for (int j = 0; j < C; ++j) b[j] = at(above, j * ld + k);
    for (int i = 0; i < R; ++i) {
      const Vec<T> a = at(rows, i * ld + k);
      for (int j = 0; j < C; ++j) c[i][j] -= a * b[j];
    }
  }
  for (int j = 0; j < C; ++j) {
    for (int i = 0; i < R; ++i) {
      for (int k = 0; k < j; ++k) c[i][j] -= c[i][k] * d.l[j][k];
      c[i][j] *= d.l[j][j];
      at(rows, i * ld + J + j) = c[i][j];
    }
  }
}

template <typename T, int C>
void factor_columns(T* w, int64_t n, int64_t ld, int64_t J, Mask<T>& info) {
  const Diagonal<T, C> d = factor_diagonal<T, C>(w, n, ld, J, info);
  int64_t I = J + C;
  for (; I + kRows <= n; I += kRows) factor_tile<T, kRows, C>(w, ld, I, J, d);
  switch (n - I) {
    case 3:
      return factor_tile<T, 3, C>(w, ld, I, J, d);
    case 2:
      return factor_tile<T, 2, C>(w, ld, I, J, d);
    case 1:
      return factor_tile<T, 1, C>(w, ld, I, J, d);
  }
}

template <typename T>
Mask<T> factor(T* w, int64_t n, int64_t ld) {
  Mask<T> info = {};
  int64_t J = 0;
  for (; J + kColumns <= n; J += kColumns) factor_columns<T, kColumns>(w, n, ld, J, info);
  for (; J < n; ++J) factor_columns<T, 1>(w, n, ld, J, info);
  return info;
}

template <typename T>
void cholesky_interleaved(const Tensor& A, bool transposed, Tensor& L, Tensor& info) {
  const int64_t n = A.size(-1), size = n * n, ld = lanes::padded(n);
  const T* a = data<T>(A);
  T* l = mutable_data<T>(L);
  int32_t* failed = mutable_data<int32_t>(info);
  lanes::for_each_group<T>(info.numel(), n * n * n / 3, [&](int64_t first, int64_t count) {
    T* w = lanes::workspace<T>(n * ld * kLanes<T>);
    triangular::pack_triangle(a + first * size, n, ld, true, size, count, w);
    const Mask<T> found = factor(w, n, ld);
    if (transposed) {
      lanes::unpack_transposed(w, n, n, ld, true, size, count, l + first * size);
    } else {
      triangular::unpack_triangle(w, n, ld, true, size, count, l + first * size);
    }
    for (int64_t i = 0; i < count; ++i) failed[first + i] = int32_t(found[i]);
  });
}

// LAPACK's factors stand column by column. Those of A^T = A, upper ones, are row-major lower ones,
// and lower ones are row-major upper ones: no factor is copied.
std::tuple<Tensor, Tensor> cholesky_lapack(const Tensor& A, bool transposed) {
  const auto [factor, info] =
      aten<2>("aten::linalg_cholesky_ex", "", transposed ? A : torch::stable::transpose(A, -2, -1),
              !transposed, false);
  return {dense(torch::stable::transpose(factor, -2, -1)), info};
}

// The lower triangle is that of A, or of A^T where an upper factor is wanted: L, or L^T.
std::tuple<Tensor, Tensor> cholesky(const Tensor& A_in, bool upper) {
  expect_square("cholesky", A_in);
  const ScalarType dtype = accumulate_dtype(A_in.scalar_type());
  const Tensor A = dense(to_dtype(upper ? torch::stable::transpose(A_in, -2, -1) : A_in, dtype));
  const int64_t n = A.size(-1), batch = n == 0 ? 0 : A.numel() / (n * n);
  Tensor L, info;
  if (n <= (batch > 2 ? interleaved_up_to : interleaved_alone_up_to)) {
    metalcore_variant = "interleaved";
    L = cpu::empty_like(A);
    info = cpu::empty(A.sizes().data(), A.dim() - 2, ScalarType::Int);
    if (dtype == ScalarType::Double) {
      cholesky_interleaved<double>(A, upper, L, info);
    } else {
      cholesky_interleaved<float>(A, upper, L, info);
    }
    if (n == 0) torch::stable::zero_(info);
  } else {
    metalcore_variant = "lapack";
    std::tie(L, info) = cholesky_lapack(A, upper);
  }
  return {to_dtype(L, A_in.scalar_type()), info};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) { m.impl("cholesky", kernel<&cholesky>); }

}  // namespace metalcore::cpu
