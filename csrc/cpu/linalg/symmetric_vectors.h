// SPDX-License-Identifier: MIT
// Eigenvalues and eigenvectors of one large symmetric matrix, unless eigenvalues are equal.
#pragma once

#include "../common/aten.h"
#include "symmetric_values.h"
#include "tridiagonal_vectors.h"

namespace metalcore::cpu {

// Makes columns of Z orthogonal that belong to a run of close eigenvalues: an error of one turns
// its vector by so much over the distance to the next. X -> X (3 - X^T X) / 2 changes them least.
// False where they are too far from orthogonal for that.
template <typename T>
bool orthogonalise_run(Tensor& Z, int64_t first, int64_t count) {
  constexpr int kRounds = 6;
  const double enough = 4 * std::numeric_limits<float>::epsilon();
  Tensor X = torch::stable::narrow(Z, 1, first, count);
  for (int round = 0; round < kRounds; ++round) {
    Tensor dots = torch::stable::matmul(torch::stable::transpose(X, 0, 1), X);
    T* d = mutable_data<T>(dots);
    double off = 0;
    for (int64_t i = 0; i < count * count; ++i) {
      const T identity = i % (count + 1) == 0 ? 1 : 0;
      off += (d[i] - identity) * (d[i] - identity);
      d[i] = T(1.5) * identity - T(0.5) * d[i];
    }
    if (!(off < 0.25)) return false;
    if (off < enough * enough * count) return true;
    torch::stable::copy_(X, torch::stable::matmul(X, dots));
  }
  return false;
}

// All runs of eigenvalues closer than vectors orthogonal to 1e-7 need.
template <typename T>
bool orthogonalise_runs(const std::vector<double>& values, Tensor& Z) {
  const double close = 4e-9 * std::max(std::abs(values.front()), std::abs(values.back()));
  const int64_t n = values.size();
  for (int64_t first = 0, next = 1; first < n; first = next++) {
    while (next < n && values[next] - values[next - 1] <= close) ++next;
    if (next - first > 1 && !orthogonalise_run<T>(Z, first, next - first)) return false;
  }
  return true;
}

// Z = Q Z for the Q of a reduction, by blocks of reflections: H_j ... H_i = I - Y W Y^T.
template <typename T>
void turn_back(const Reduced<T>& reduced, Tensor& Z) {
  constexpr int64_t kBlock = 64, kRows = 4, kTile = TridiagonalLarge<T>::kTile;
  const int64_t n = reduced.n, ld = Z.size(1);
  T* z = mutable_data<T>(Z);
  // reflections as rows, and as columns
  std::vector<T> y(kBlock * (n + kRows)), yt(y.size()), w(kBlock * kBlock);
  for (int64_t first = 2; first < n; first += kBlock) {
    const int64_t last = std::min(n, first + kBlock);
    // rows that they reach, a whole number of groups
    const int64_t m = (last - 1 + kRows - 1) / kRows * kRows;
    std::fill(y.begin(), y.end(), T(0));
    for (int64_t j = 0; j < last - first; ++j) {
      // from the last one on, with zeros past its end
      const int64_t i = last - 1 - j;
      if (reduced.form.tau[i] != 0) std::copy_n(reduced.row(i), i, y.data() + j * m);
    }
    for (int64_t j = 0; j < kBlock; ++j) {
      for (int64_t i = 0; i < m; ++i) yt[i * kBlock + j] = y[j * m + i];
    }
    // -W, upper triangular
    std::fill(w.begin(), w.end(), T(0));
    for (int64_t j = 0; j < last - first; ++j) {
      const T tau = reduced.form.tau[last - 1 - j];
      T dots[kBlock];
      for (int64_t k = 0; k < j; ++k) {
        dots[k] = dot(y.data() + k * m, y.data() + j * m, m);
      }
      for (int64_t i = 0; i < j; ++i) {
        T sum = 0;
        for (int64_t k = i; k < j; ++k) sum += w[i * kBlock + k] * dots[k];
        w[i * kBlock + j] = -tau * sum;
      }
      w[j * kBlock + j] = -tau;
    }
    parallel_for(0, ld / kTile, 1, [&](int64_t begin, int64_t end) {
      constexpr int kWide = kTile / simd::kLanes<T>;
      for (T* columns = z + begin * kTile; columns < z + end * kTile; columns += kTile) {
        // -Y^T Z, then W Y^T Z
        T shares[kBlock * kTile] = {}, turned[kBlock * kTile] = {};
        const auto row_of_z = [&](int64_t k) { return columns + k * ld; };
        for (int64_t j = 0; j < kBlock; j += kRows) {
          subtract_product<T, kRows, kWide>(
              m, [&](int64_t k) { return yt.data() + k * kBlock + j; }, row_of_z,
              shares + j * kTile, kTile);
        }
        for (int64_t i = 0; i < kBlock; ++i) {
          for (int64_t k = i; k < kBlock; ++k) {
            for (int64_t l = 0; l < kTile; ++l) {
              turned[i * kTile + l] += w[i * kBlock + k] * shares[k * kTile + l];
            }
          }
        }
        for (int64_t row = 0; row < m; row += kRows) {
          subtract_product<T, kRows, kWide>(
              kBlock, [&](int64_t k) { return y.data() + k * m + row; },
              [&](int64_t k) { return turned + k * kTile; }, columns + row * ld, ld);
        }
      }
    });
  }
}

// Values ascending, and vectors as columns, orthogonal to a few 1e-7 or as float32 is, from the
// lower triangle of `a`. False where it has a NaN or an inf, or where eigenvalues are equal.
template <typename T>
bool symmetric_vectors(const T* a, int64_t n, Tensor& values, Tensor& vectors) {
  const T largest = largest_below(a, n);
  if (!(largest > 0)) return false;
  const Reduced<T> reduced(a, n, largest);
  const std::vector<double> diagonal(reduced.form.diagonal.begin(), reduced.form.diagonal.end());
  const std::vector<double> beside(reduced.form.beside.begin(), reduced.form.beside.end());
  std::vector<double> found(n);
  tridiagonal_values(diagonal, beside, found.data());
  constexpr int64_t kTile = TridiagonalLarge<T>::kTile;
  // a whole number of tiles, and of rows that are turned together
  const std::array<int64_t, 2> sizes = {(n + 3) / 4 * 4, (n + kTile - 1) / kTile * kTile};
  Tensor Z = cpu::empty(sizes.data(), 2, torch::headeronly::CppTypeToScalarType<T>::value);
  T* z = mutable_data<T>(Z);
  for (int64_t i = 0; i < sizes[0]; ++i) std::fill_n(z + i * sizes[1], sizes[1], T(0));
  if (!tridiagonal_vectors(diagonal, beside, found, sizes[1], z)) return false;
  if (!orthogonalise_runs<T>(found, Z)) return false;
  turn_back(reduced, Z);
  values = cpu::empty(&n, 1, Z.scalar_type());
  for (int64_t i = 0; i < n; ++i) {
    mutable_data<T>(values)[i] = T(found[i] * reduced.back.first * reduced.back.second);
  }
  Tensor rows = torch::stable::narrow(Z, 0, 0, n);
  vectors = torch::stable::narrow(rows, 1, 0, n);
  return true;
}

}  // namespace metalcore::cpu
