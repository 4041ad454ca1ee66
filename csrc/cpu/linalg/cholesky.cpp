// SPDX-License-Identifier: MIT
// Cholesky on the CPU. Small matrices are factored side by side, one per lane, by columns of 4 x 4
// register tiles; large ones by LAPACK.

#include <tuple>

#include "../common/aten.h"
#include "../common/lanes.h"
#include "../common/policy.h"

namespace metalcore::cpu {
namespace {

using lanes::at;
using lanes::Mask;
using lanes::splat;
using simd::kLanes;
using simd::Vec;

const Knob interleaved_up_to("cholesky", "interleaved_up_to");
const Knob interleaved_alone_up_to("cholesky", "interleaved_alone_up_to");

// Rows and columns that one tile holds in registers.
constexpr int64_t kTile = 4;

// Rows I.. of columns J.. as the columns before them leave them: a - l_i l_j^T, for up to kTile.
template <typename T>
inline void tile_minus_product(const T* w, int64_t ld, int64_t I, int64_t J, int64_t rows,
                               int64_t columns, Vec<T> c[kTile][kTile]) {
  for (int64_t i = 0; i < kTile; ++i) {
    for (int64_t j = 0; j < kTile; ++j) {
      c[i][j] = i < rows && j < columns ? at(w, (I + i) * ld + J + j) : Vec<T>{};
    }
  }
  // rows past the end read the last one, and are dropped
  const T *x[kTile], *y[kTile];
  for (int64_t i = 0; i < kTile; ++i) {
    x[i] = w + (I + std::min(i, rows - 1)) * ld * kLanes<T>;
    y[i] = w + (J + std::min(i, columns - 1)) * ld * kLanes<T>;
  }
  for (int64_t k = 0; k < J; ++k) {
    Vec<T> b[kTile];
    for (int64_t j = 0; j < kTile; ++j) b[j] = at(y[j], k);
    for (int64_t i = 0; i < kTile; ++i) {
      const Vec<T> a = at(x[i], k);
      for (int64_t j = 0; j < kTile; ++j) c[i][j] -= a * b[j];
    }
  }
}

// Factors the tile on the diagonal; `reciprocal` gets 1 / l_jj. `info` keeps the first failure.
template <typename T>
inline void factor_diagonal(Vec<T> c[kTile][kTile], int64_t J, int64_t columns,
                            Vec<T> reciprocal[kTile], Mask<T>& info) {
  for (int64_t j = 0; j < columns; ++j) {
    Vec<T> s = c[j][j];
    for (int64_t k = 0; k < j; ++k) s -= c[j][k] * c[j][k];
    const Mask<T> fails = !(s > 0);
    info = (info == 0) & fails ? Mask<T>{} + lanes::Int<T>(J + j + 1) : info;
    c[j][j] = lanes::sqrt(s);
    reciprocal[j] = splat<T>(1) / c[j][j];
    for (int64_t i = j + 1; i < kTile; ++i) {
      Vec<T> t = c[i][j];
      for (int64_t k = 0; k < j; ++k) t -= c[i][k] * c[j][k];
      c[i][j] = t * reciprocal[j];
    }
  }
}

template <typename T>
Mask<T> factor(T* w, int64_t n, int64_t ld) {
  Mask<T> info = {};
  for (int64_t J = 0; J < n; J += kTile) {
    const int64_t columns = std::min(kTile, n - J);
    Vec<T> d[kTile][kTile], reciprocal[kTile] = {};
    tile_minus_product(w, ld, J, J, columns, columns, d);
    factor_diagonal<T>(d, J, columns, reciprocal, info);
    for (int64_t i = 0; i < columns; ++i) {
      for (int64_t j = 0; j < columns; ++j)
        at(w, (J + i) * ld + J + j) = j <= i ? d[i][j] : Vec<T>{};
      for (int64_t j = J + columns; j < n; ++j) at(w, (J + i) * ld + j) = Vec<T>{};
    }
    for (int64_t I = J + columns; I < n; I += kTile) {
      const int64_t rows = std::min(kTile, n - I);
      Vec<T> c[kTile][kTile];
      tile_minus_product(w, ld, I, J, rows, columns, c);
      for (int64_t i = 0; i < kTile; ++i) {
        for (int64_t j = 0; j < kTile; ++j) {
          for (int64_t k = 0; k < j; ++k) c[i][j] -= c[i][k] * d[j][k];
          c[i][j] *= reciprocal[j];
        }
      }
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; ++j) at(w, (I + i) * ld + J + j) = c[i][j];
      }
    }
  }
  return info;
}

template <typename T>
void cholesky_interleaved(const Tensor& A, Tensor& L, Tensor& info) {
  const int64_t n = A.size(-1), size = n * n, ld = lanes::padded(n);
  const T* a = data<T>(A);
  T* l = mutable_data<T>(L);
  int32_t* failed = mutable_data<int32_t>(info);
  lanes::for_each_group<T>(info.numel(), n * n * n / 3, [&](int64_t first, int64_t count) {
    T* w = lanes::workspace<T>(n * ld * kLanes<T>);
    lanes::pack_matrix(a + first * size, n, n, ld, size, count, w);
    const Mask<T> found = factor(w, n, ld);
    lanes::unpack_matrix(w, n, n, ld, size, count, l + first * size);
    for (int64_t i = 0; i < count; ++i) failed[first + i] = int32_t(found[i]);
  });
}

// A row-major lower factor is a column-major upper one, so LAPACK needs no transposed copies.
std::tuple<Tensor, Tensor> cholesky_lapack(const Tensor& A, bool upper) {
  const auto [factor, info] =
      aten<2>("aten::linalg_cholesky_ex", "", torch::stable::transpose(A, -2, -1), !upper, false);
  return {dense(torch::stable::transpose(factor, -2, -1)), info};
}

std::tuple<Tensor, Tensor> cholesky(const Tensor& A_in, bool upper) {
  const ScalarType dtype = accumulate_dtype(A_in.scalar_type());
  const Tensor A = dense(to_dtype(upper ? torch::stable::transpose(A_in, -2, -1) : A_in, dtype));
  const int64_t n = A.size(-1), batch = n == 0 ? 0 : A.numel() / (n * n);
  const int64_t lanes = MC_REGISTER_BYTES / (dtype == ScalarType::Double ? 8 : 4);
  Tensor L, info;
  if (n <= (batch * 2 > lanes ? interleaved_up_to : interleaved_alone_up_to)) {
    metalcore_variant = "interleaved";
    L = cpu::empty_like(A);
    info = cpu::empty(A.sizes().data(), A.dim() - 2, ScalarType::Int);
    if (dtype == ScalarType::Double) {
      cholesky_interleaved<double>(A, L, info);
    } else {
      cholesky_interleaved<float>(A, L, info);
    }
    if (n == 0) torch::stable::zero_(info);
  } else {
    metalcore_variant = "lapack";
    std::tie(L, info) = cholesky_lapack(A, false);
  }
  if (upper) L = dense(torch::stable::transpose(L, -2, -1));
  return {to_dtype(L, A_in.scalar_type()), info};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore, CPU, m) { m.impl("cholesky", TORCH_BOX(&cholesky)); }

}  // namespace metalcore::cpu
