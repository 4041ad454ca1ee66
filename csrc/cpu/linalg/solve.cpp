// SPDX-License-Identifier: MIT
// Solution of A X = B on the CPU; X is laid out as B is, row by row or column by column. Small
// matrices are factored and substituted side by side, one per lane, in one pass; large ones by
// LAPACK.

#include <tuple>

#include "../common/aten.h"
#include "../common/policy.h"
#include "expect.h"
#include "lu.h"

namespace metalcore::cpu {
namespace {

using lanes::at;
using lanes::LU;
using simd::kLanes;
using simd::Vec;

// Largest N that is solved side by side,
const Knob interleaved_up_to("solve", "interleaved_up_to", 128);
// and for a single matrix, times their number for a few: lanes are idle then.
const Knob interleaved_alone_up_to("solve", "interleaved_alone_up_to", 56);

constexpr int kRefinements = 3;

// Rows order[0..rows) of `width` columns, of each of `count` matrices [n, width] column by column
// and `stride` apart, into x [rows, width].
template <typename T>
void pack_columns(const LU<T>& lu, const T* b, int64_t stride, int64_t count, int64_t width, T* x) {
  constexpr int64_t L = kLanes<T>;
  const lanes::detail::Starts<const T> start(b, stride, count);
  for (int64_t i = 0; i < lu.m; ++i) {
    const T* from[L];
#pragma GCC unroll 16
    for (int64_t l = 0; l < L; ++l) from[l] = start.of[l] + lu.order[i][l];
    for (int64_t j = 0; j < width; ++j) {
      T* to = x + (i * width + j) * L;
#pragma GCC unroll 16
      for (int64_t l = 0; l < L; ++l) to[l] = from[l][j * lu.m];
    }
  }
  for (int64_t e = lu.m * width; e < lu.rows * width; ++e) at(x, e) = Vec<T>{};
}

// x [n, k] of each of `count` systems from b [n, k], both column by column where `by_columns`,
// through x_lanes [rows, chunk] in lanes.
template <typename T>
void substitute(const LU<T>& lu, const T* b, int64_t k, bool by_columns, int64_t count, T* x_lanes,
                T* x) {
  constexpr int64_t L = kLanes<T>, C = lanes::kChunk<T>;
  const int64_t n = lu.n;
  for (int64_t first = 0; first < k; first += C) {
    const int64_t width = std::min(C, k - first);
    if (by_columns) {
      pack_columns(lu, b + first * n, n * k, count, width, x_lanes);
    } else {
      lanes::pack_ordered(lu, b, k, n * k, count, first, width, x_lanes, width, width);
    }
    lanes::for_each_tile(width, [&]<int W>(std::integral_constant<int, W>, int64_t j) {
      lanes::eliminate<T, W>(lu, lu.rows, x_lanes + j * L, width);
      lanes::substitute_back<T, W>(lu, x_lanes + j * L, width);
    });
    if (by_columns) {
      lanes::unpack_transposed(x_lanes, n, width, width, false, n * k, count, x + first * n);
    } else if (width == k) {
      lanes::unpack(x_lanes, n * k, n * k, count, x);
    } else {
      for (int64_t i = 0; i < n; ++i) {
        lanes::unpack(x_lanes + i * width * L, width, n * k, count, x + i * k + first);
      }
    }
  }
}

template <typename T>
void solve_interleaved(const Tensor& A, const Tensor& B, Tensor& X, Tensor& info) {
  const int64_t n = A.size(-1), k = B.size(-1);
  const bool by_columns = is_by_columns(B);
  const T *a = data<T>(A), *b = data<T>(B);
  T* x = mutable_data<T>(X);
  int32_t* failed = mutable_data<int32_t>(info);
  const int64_t flops = n * n * (n / 3 + k);
  lanes::for_each_group<T>(info.numel(), flops, [&](int64_t first, int64_t count) {
    LU<T> lu(n, n);
    const int64_t strip = lu.rows * std::min(lanes::kChunk<T>, k);
    T* x_lanes = lu.place(lanes::workspace<T>((lu.size() + strip) * kLanes<T>));
    lanes::factor(lu, a + first * n * n, count);
    substitute(lu, b + first * n * k, k, by_columns, count, x_lanes, x + first * n * k);
    for (int64_t i = 0; i < count; ++i) failed[first + i] = int32_t(lu.info[i]);
  });
}

// B is dense either way, and so is X.
std::tuple<Tensor, Tensor> solve_small(const Tensor& A, const Tensor& B) {
  Tensor X = cpu::empty_laid_out_as(B);
  Tensor info = cpu::empty(A.sizes().data(), A.dim() - 2, ScalarType::Int);
  if (A.scalar_type() == ScalarType::Double) {
    solve_interleaved<double>(A, B, X, info);
  } else {
    solve_interleaved<float>(A, B, X, info);
  }
  if (A.size(-1) == 0) torch::stable::zero_(info);
  return {X, info};
}

// X + solution(B - A X), with the residual in float64, a few times.
template <typename Solution>
Tensor refined(const Tensor& A, const Tensor& B, Tensor X, Solution solution) {
  const Tensor A64 = to_dtype(A, ScalarType::Double), B64 = to_dtype(B, ScalarType::Double);
  for (int step = 0; step < kRefinements; ++step) {
    const Tensor AX = torch::stable::matmul(A64, to_dtype(X, ScalarType::Double));
    const Tensor R = torch::stable::subtract(B64, AX);
    X = torch::stable::subtract(X, solution(dense_either_way(to_dtype(R, X.scalar_type()))), -1);
  }
  return X;
}

std::tuple<Tensor, Tensor> solve(const Tensor& A_in, const Tensor& B_in, bool refine) {
  expect_square("solve", A_in);
  expect_system("solve", A_in, B_in);
  const ScalarType dtype = accumulate_dtype(A_in.scalar_type());
  const Tensor A = dense(to_dtype(A_in, dtype)), B = dense_either_way(to_dtype(B_in, dtype));
  Tensor X, info;
  if (lanes::fit(A, interleaved_up_to, interleaved_alone_up_to)) {
    metalcore_variant = "interleaved";
    std::tie(X, info) = solve_small(A, B);
    if (refine) {
      X = refined(A, B, X, [&](const Tensor& R) { return std::get<0>(solve_small(A, R)); });
    }
  } else {
    metalcore_variant = "lapack";
    // the columns of A^T are the rows of A, so LAPACK needs no transposed copy
    const auto [LU_, pivots, failed] =
        aten<3>("aten::linalg_lu_factor_ex", "", turned(A), true, false);
    const auto solution = [&](const Tensor& R) {
      return aten<1>("aten::linalg_lu_solve", "", LU_, pivots, R, true, true)[0];
    };
    X = solution(B);
    if (refine) X = refined(A, B, X, solution);
    info = failed;
  }
  return {to_dtype(laid_out_as(B, X), A_in.scalar_type()), info};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) { m.impl("solve", kernel<&solve>); }

}  // namespace metalcore::cpu
