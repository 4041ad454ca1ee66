// SPDX-License-Identifier: MIT
// A = U S V^T of one large float32 matrix by the eigenvectors of A^T A: V, and U = A V / S. In
// float32 for matrices far from singular, in float64 up to a condition of 1e5.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "../common/aten.h"
#include "symmetric_vectors.h"

namespace metalcore::cpu {

struct Decomposed {
  Tensor U, S, V, info;
  const char* variant = nullptr;
};

// The lower triangle of X^T X, with what a product by blocks computes above its diagonal.
inline Tensor gram_matrix(Tensor X) {
  // 8: 1.6x over one product of 4096 x 1024
  constexpr int64_t kBlocks = 8;
  const int64_t n = X.size(1), block = std::max<int64_t>(128, (n + kBlocks - 1) / kBlocks);
  const std::array<int64_t, 2> sizes = {n, n};
  Tensor gram = cpu::empty(sizes.data(), 2, X.scalar_type());
  for (int64_t first = 0; first < n; first += block) {
    const int64_t rows = std::min(block, n - first), columns = first + rows;
    const Tensor left = torch::stable::transpose(torch::stable::narrow(X, 1, first, rows), 0, 1);
    const Tensor right = torch::stable::narrow(X, 1, 0, columns);
    Tensor strip = torch::stable::narrow(gram, 0, first, rows);
    strip = torch::stable::narrow(strip, 1, 0, columns);
    aten<1>("aten::mm", "out", left, right, strip);
  }
  return gram;
}

inline Tensor flip(const Tensor& x) {
  return aten<1>("aten::flip", "", x, std::vector<int64_t>{-1})[0];
}

// Mean and relative variance of the eigenvalues of a Gram matrix, of which the lower triangle is
// there. The root of the latter is sqrt(n / m) for Gaussian matrices, and their condition
// (1 + x) / (1 - x).
template <typename T>
std::pair<double, double> mean_and_variance(const Tensor& gram) {
  const int64_t n = gram.size(0);
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < n; ++i) {
    const T* row = data<T>(gram) + i * n;
    double off = 0;
    for (int64_t j = 0; j < i; ++j) off += double(row[j]) * row[j];
    sum += row[i];
    squares += 2 * off + double(row[i]) * row[i];
  }
  const double mean = sum / n;
  return {mean, squares / n / (mean * mean) - 1};
}

// Whether they look near enough to each other for `svd_gram_narrow`, and their squares are numbers
// of float32.
inline bool looks_narrow(double mean, double variance) {
  constexpr double kSpread = 0.6, kRange = 1e15;
  return mean > 1 / kRange && mean < kRange && variance < kSpread * kSpread;
}

struct Eigen {
  Tensor values, vectors;
  bool by_lapack;
};

// Eigenvalues, ascending, and eigenvectors of a Gram matrix; LAPACK's where some are equal, which
// is seen at once where all are.
template <typename T>
Eigen eigen(const Tensor& gram, double variance) {
  constexpr double kAllEqual = 1e-12;
  Eigen out;
  out.by_lapack = variance <= kAllEqual ||
                  !symmetric_vectors(data<T>(gram), gram.size(0), out.values, out.vectors);
  if (out.by_lapack) {
    const auto [values, vectors] = aten<2>("aten::_linalg_eigh", "", gram, std::string("L"), true);
    out.values = values;
    out.vectors = vectors;
  }
  return out;
}

// y[:, j] = x[:, order[j]] * scale[order[j]]
inline Tensor scaled_columns(const Tensor& x, const std::vector<int64_t>& order,
                             const std::vector<float>& scale) {
  const int64_t m = x.size(0), n = x.size(1);
  Tensor y = cpu::empty_like(x);
  const float* from = data<float>(x);
  float* to = mutable_data<float>(y);
  parallel_for(0, m, std::max<int64_t>(1, 65536 / n), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < n; ++j) to[i * n + j] = from[i * n + order[j]] * scale[order[j]];
    }
  });
  return y;
}

inline std::vector<double> column_norms(const Tensor& x) {
  const int64_t m = x.size(0), n = x.size(1);
  std::vector<double> norms(n);
  for (int64_t i = 0; i < m; ++i) {
    const float* row = data<float>(x) + i * n;
    for (int64_t j = 0; j < n; ++j) norms[j] += double(row[j]) * row[j];
  }
  for (double& norm : norms) norm = std::sqrt(norm);
  return norms;
}

// In float32, as accurate as LAPACK for a condition of 3: U is orthogonal to about condition^2 *
// 4e-7 in the spectral norm, and LAPACK's to 4e-6. False where the matrix is not for that.
inline bool svd_gram_narrow(const Tensor& given, Decomposed& out) {
  constexpr double kLargestCondition = 3.2;
  // a Gaussian matrix of 4 n rows has a condition of 3
  if (given.size(0) < 4 * given.size(1)) return false;
  const Tensor A = dense(given);
  const Tensor gram = gram_matrix(A);
  const auto [mean, variance] = mean_and_variance<float>(gram);
  if (!looks_narrow(mean, variance)) return false;
  const int64_t n = A.size(1);
  const auto [values, basis, by_lapack] = eigen<float>(gram, variance);
  out.variant = by_lapack ? "gram_float32_lapack" : "gram_float32";
  const float* ascending = data<float>(values);
  if (!(ascending[n - 1] < kLargestCondition * kLargestCondition * ascending[0])) return false;

  // LAPACK's eigenvectors are less of length 1 than they are orthogonal
  const Tensor V = dense(basis);
  const std::vector<double> lengths = column_norms(V);
  const Tensor AV = torch::stable::matmul(A, V);
  const std::vector<double> stretched = column_norms(AV);
  std::vector<double> S(n);
  std::transform(stretched.begin(), stretched.end(), lengths.begin(), S.begin(), std::divides<>());
  std::vector<int64_t> order(n);
  std::iota(order.rbegin(), order.rend(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return S[i] > S[j]; });
  out.S = cpu::empty_like(values);
  for (int64_t j = 0; j < n; ++j) mutable_data<float>(out.S)[j] = float(S[order[j]]);
  const auto inverse = [](const std::vector<double>& x) {
    std::vector<float> y(x.size());
    std::transform(x.begin(), x.end(), y.begin(), [](double v) { return float(1 / v); });
    return y;
  };
  out.U = scaled_columns(dense(AV), order, inverse(stretched));
  out.V = scaled_columns(V, order, inverse(lengths));
  return true;
}

// The values alone, of any condition: an error of epsilon in A^T A in float64 is one of its root,
// which float32 does not have, in the smallest of them. False where A has a NaN or an inf.
inline bool svdvals_gram(const Tensor& A, Decomposed& out) {
  const int64_t n = A.size(1);
  const Tensor gram = gram_matrix(to_dtype(A, ScalarType::Double));
  std::vector<double> squares(n);
  if (!symmetric_values(data<double>(gram), n, squares.data())) return false;
  out.variant = "gram";
  out.S = cpu::empty(&n, 1, A.scalar_type());
  std::transform(squares.rbegin(), squares.rend(), mutable_data<float>(out.S),
                 [](double x) { return float(std::sqrt(std::max(x, 0.0))); });
  return true;
}

// A = (A V / S) S V^T with A^T A = V S^2 V^T in float64, for one tall matrix. U is orthogonal to
// about condition^2 * 1e-16, so there is a limit to it: false is for other ways. The factor of A^T
// A shows most of these before the eigenvectors are paid for.
inline bool svd_gram(const Tensor& A, Decomposed& out) {
  constexpr double kLargestCondition = 1e5, kNarrowCondition = 32;
  const Tensor wide = to_dtype(A, ScalarType::Double);
  const Tensor gram = gram_matrix(wide);
  const auto [factor, info] = aten<2>("aten::linalg_cholesky_ex", "", gram, false, false);
  if (*data<int32_t>(info) != 0) return false;
  const Tensor diagonal =
      dense(aten<1>("aten::diagonal", "", factor, int64_t(0), int64_t(0), int64_t(1))[0]);
  const double* r = data<double>(diagonal);
  const auto [least, most] = std::minmax_element(r, r + A.size(1));
  if (!(*least * kLargestCondition > *most)) return false;

  const auto [values, basis, by_lapack] =
      eigen<double>(gram, mean_and_variance<double>(gram).second);
  out.variant = by_lapack ? "gram_lapack" : "gram";
  const double* ascending = data<double>(values);
  const double condition = std::sqrt(ascending[A.size(1) - 1] / ascending[0]);
  if (!(condition < kLargestCondition)) return false;
  const Tensor S = aten<1>("aten::sqrt", "", flip(values))[0];
  out.S = to_dtype(S, A.scalar_type());
  const Tensor V = flip(basis);
  const Tensor scaled = aten<1>("aten::div", "Tensor", V, S)[0];
  // a product in float32 loses a digit of orthogonality for each of the condition
  const bool narrow = condition < kNarrowCondition;
  const Tensor basis_of_u = narrow ? to_dtype(scaled, A.scalar_type()) : scaled;
  out.U = aten<1>("aten::mm", "", narrow ? A : wide, basis_of_u)[0];
  out.U = dense(to_dtype(out.U, A.scalar_type()));
  out.V = dense(to_dtype(V, A.scalar_type()));
  return true;
}

}  // namespace metalcore::cpu
