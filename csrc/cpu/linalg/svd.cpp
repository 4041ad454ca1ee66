// SPDX-License-Identifier: MIT
// Singular value decomposition on the CPU. Small matrices are decomposed side by side, one per
// lane; large float32 ones by the eigenvectors of their Gram matrix where their condition allows
// it; the rest by LAPACK, after a QR factorization where they are long.

#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>

#include "../common/aten.h"
#include "../common/policy.h"
#include "bidiagonal_group.h"
#include "expect.h"
#include "svd_gram.h"

namespace metalcore::cpu {
namespace {

using bidiagonal::Group;
using bidiagonal::kNotFinite;
using bidiagonal::Sides;
using lanes::at;
using lanes::Mask;
using lanes::splat;
using simd::kLanes;
using simd::Vec;
using torch::stable::transpose;

// Most columns of matrices that are decomposed side by side,
const Knob interleaved_up_to("svd", "interleaved_up_to", 192);
// and of single ones, where most lanes are idle.
const Knob interleaved_alone_up_to("svd", "interleaved_alone_up_to", 4);
// A group of 8 lanes takes as long as LAPACK does for 1 + N / lanes_worth matrices.
const Knob lanes_worth("svd", "lanes_worth", 40);
// Fewest columns of single float32 matrices that take the eigenvectors of their Gram matrix: those
// with at least twice as many rows, others, and those of which only values are wanted.
const Knob gram_from("svd", "gram_from", 128);
const Knob gram_square_from("svd", "gram_square_from", 512);
const Knob values_gram_from("svd", "values_gram_from", 64);

// What is found of least squares problems.
struct Solved {
  Tensor X, S, rank, info;
};

// Singular values of a group, descending, and info.
template <typename T>
void write_values(const Group<T>& g, Mask<T> info, int64_t first, int64_t count, const Tensor& S,
                  const Tensor& infos) {
  T* s = mutable_data<T>(S) + first * g.n;
  int32_t* found = mutable_data<int32_t>(infos) + first;
  lanes::unpack(g.b.d, g.n, g.n, count, s);
  for (int64_t l = 0; l < count; ++l) {
    // nearly in order already: the smallest ones were found first, at the end
    for (T *x = s + l * g.n, *end = x + g.n, *y = x; y != end; ++y) {
      std::rotate(std::upper_bound(x, y, *y, std::greater<T>()), y, y + 1);
    }
    found[l] = int32_t(info[l]);
  }
}

template <typename T>
void svd_interleaved(const Tensor& A, bool vectors, const Decomposed& out) {
  const int64_t m = A.size(-2), n = A.size(-1), batch = out.info.numel();
  const int64_t columns = vectors ? out.U.size(-1) : n;
  lanes::for_each_group<T>(batch, 16 * m * n * n, [&](int64_t first, int64_t count) {
    Group<T> g(m, n, columns);
    lanes::pack(data<T>(A) + first * m * n, m * n, m * n, count, g.u.w);
    const Mask<T> info = decompose(g, vectors);
    write_values(g, info, first, count, out.S, out.info);
    if (!vectors) return;
    const std::vector<int32_t> order = descending(g, count);
    // the input is used up: its place holds rows on their way out
    T *row = g.a.w, *values = g.b.column;
    write_columns(g.u, order.data(), n, count, row, values,
                  mutable_data<T>(out.U) + first * m * columns);
    write_columns(g.v, order.data(), n, count, row, values, mutable_data<T>(out.V) + first * n * n);
  });
}

// A is tall; with `wide` it is the transpose of what is to be solved.
template <typename T>
void solve_interleaved(const Tensor& A, const Tensor& B, const Tensor& rcond, bool wide,
                       const Solved& out) {
  const int64_t m = A.size(-2), n = A.size(-1), columns = B.size(-1), batch = out.info.numel();
  const int64_t from = B.size(-2) * columns, to = out.X.size(-2) * columns;
  const int64_t flops = 8 * m * n * n + 4 * m * n * columns;
  const T* limits = data<T>(rcond);
  int64_t* ranks = mutable_data<int64_t>(out.rank);
  lanes::for_each_group<T>(batch, flops, [&](int64_t first, int64_t count) {
    Group<T> g(m, n, n, Sides<T>::registers(m, n, columns));
    const int64_t step = m * columns * kLanes<T>;
    const Sides<T> sides = {columns, g.rest, g.rest + step, g.rest + 2 * step};
    lanes::pack(data<T>(A) + first * m * n, m * n, m * n, count, g.u.w);
    lanes::pack(data<T>(B) + first * from, from, from, count, sides.c);
    Vec<T> limit = {};
    for (int64_t l = 0; l < count; ++l) limit[l] = limits[first + l];
    Mask<T> rank;
    const Mask<T> info = solve(g, sides, wide, limit, rank);
    write_values(g, info, first, count, out.S, out.info);
    for (int64_t l = 0; l < count; ++l) ranks[first + l] = rank[l];
    lanes::unpack(sides.c, to, to, count, mutable_data<T>(out.X) + first * to);
  });
}

template <typename T>
bool all_finite(const T* x, int64_t count) {
  T sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += x[i] * 0;
  return sum == 0;
}

// Matrices with entries that are not finite become zero, get their info and later NaN: LAPACK would
// stop for all of the batch.
template <typename T>
Tensor set_broken_aside(const Tensor& A, const Tensor& info) {
  const int64_t size = A.size(-2) * A.size(-1), batch = info.numel();
  Tensor clean = A;
  for (int64_t b = 0; b < batch; ++b) {
    if (all_finite(data<T>(A) + b * size, size)) continue;
    mutable_data<int32_t>(info)[b] = kNotFinite;
    if (clean.const_data_ptr() == A.const_data_ptr()) clean = torch::stable::clone(A);
    std::fill_n(mutable_data<T>(clean) + b * size, size, T(0));
  }
  return clean;
}

template <typename T>
void fill_broken(const Tensor& info, Tensor& x) {
  const int64_t batch = info.numel();
  if (x.numel() == 0) return;
  const int64_t size = x.numel() / batch;
  for (int64_t b = 0; b < batch; ++b) {
    if (data<int32_t>(info)[b] == 0) continue;
    std::fill_n(mutable_data<T>(x) + b * size, size, std::numeric_limits<T>::quiet_NaN());
  }
}

template <typename T>
void svd_lapack(const Tensor& A, bool full, bool vectors, Decomposed& out) {
  torch::stable::zero_(out.info);
  const Tensor clean = set_broken_aside<T>(A, out.info);
  const auto [U, S, Vh] =
      aten<3>("aten::_linalg_svd", "", clean, full, vectors, std::optional<std::string>());
  out.S = dense(S);
  fill_broken<T>(out.info, out.S);
  if (!vectors) return;
  out.U = dense(U), out.V = dense(transpose(Vh, -2, -1));
  fill_broken<T>(out.info, out.U);
  fill_broken<T>(out.info, out.V);
}

// Whether lanes are ahead of LAPACK: a group takes as long as it takes with one matrix in it.
bool side_by_side(int64_t m, int64_t n, int64_t batch, int64_t lanes) {
  // long ones are for LAPACK, which makes them square first, and so are those past the caches
  if (m > std::max<int64_t>(2 * n, 256) || m * n > interleaved_up_to * interleaved_up_to) {
    return false;
  }
  const int64_t groups = (batch + lanes - 1) / lanes;
  return n <= interleaved_alone_up_to ||
         batch * lanes_worth > groups * (n * lanes / 8 + lanes_worth);
}

// `given` may be a transposed view.
template <typename T>
Decomposed decompose_tall(const Tensor& given, bool full, bool vectors) {
  const int64_t m = given.size(-2), n = given.size(-1), dim = given.dim();
  std::vector<int64_t> sizes(given.sizes().begin(), given.sizes().end());
  const int64_t batch =
      std::accumulate(sizes.begin(), sizes.end() - 2, int64_t(1), std::multiplies<>());
  Decomposed out;
  out.info = cpu::empty(sizes.data(), dim - 2, ScalarType::Int);
  if (sizeof(T) == 4 && !full && dim == 2) {
    const int64_t from = !vectors ? values_gram_from : m >= 2 * n ? gram_from : gram_square_from;
    if (n >= from && (vectors ? svd_gram_narrow(given, out) || svd_gram(given, out)
                              : svdvals_gram(given, out))) {
      metalcore_variant = out.variant;
      torch::stable::zero_(out.info);
      return out;
    }
  }
  const Tensor A = dense(given);
  if (n > 0 && batch > 0 && side_by_side(m, n, batch, kLanes<T>)) {
    metalcore_variant = "interleaved";
    const auto make = [&](int64_t rows, int64_t columns) {
      sizes[dim - 2] = rows, sizes[dim - 1] = columns;
      return cpu::empty(sizes.data(), dim, A.scalar_type());
    };
    if (vectors) out.U = make(m, full ? m : n), out.V = make(n, n);
    sizes[dim - 2] = n;
    out.S = cpu::empty(sizes.data(), dim - 1, A.scalar_type());
    svd_interleaved<T>(A, vectors, out);
    return out;
  }
  metalcore_variant = "lapack";
  svd_lapack<T>(A, full, vectors, out);
  return out;
}

Decomposed decompose(const Tensor& A_in, bool full, bool vectors) {
  const ScalarType dtype = accumulate_dtype(A_in.scalar_type());
  const bool wide = A_in.size(-2) < A_in.size(-1);
  const Tensor A = to_dtype(wide ? transpose(A_in, -2, -1) : A_in, dtype);
  Decomposed out = dtype == ScalarType::Double ? decompose_tall<double>(A, full, vectors)
                                               : decompose_tall<float>(A, full, vectors);
  out.S = to_dtype(out.S, A_in.scalar_type());
  if (!vectors) return out;
  out.U = to_dtype(out.U, A_in.scalar_type());
  out.V = to_dtype(out.V, A_in.scalar_type());
  if (wide) std::swap(out.U, out.V);
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> svd(const Tensor& A, bool full_matrices) {
  expect_matrices("svd", A);
  Decomposed out = decompose(A, full_matrices, true);
  return {out.U, out.S, out.V, out.info};
}

std::tuple<Tensor, Tensor> svdvals(const Tensor& A) {
  expect_matrices("svdvals", A);
  Decomposed out = decompose(A, false, false);
  return {out.S, out.info};
}

// How many singular values count for each matrix, into `rank`; whether these are all.
template <typename T>
bool count_values(const Tensor& S, const Tensor& rcond, Tensor& rank) {
  const int64_t n = S.size(-1), batch = rcond.numel();
  bool all = true;
  for (int64_t b = 0; b < batch; ++b) {
    const T* s = data<T>(S) + b * n;
    const T limit = n > 0 ? data<T>(rcond)[b] * s[0] : 0;
    const int64_t count = std::count_if(s, s + n, [&](T x) { return x > limit; });
    mutable_data<int64_t>(rank)[b] = count;
    all &= count == n;
  }
  return all;
}

// V diag(1 / S) U^T B, over the values that count.
template <typename T>
Solved solve_by_vectors(const Decomposed& parts, const Tensor& B, const Tensor& rcond,
                        Tensor rank) {
  const int64_t n = parts.S.size(-1), batch = rcond.numel();
  count_values<T>(parts.S, rcond, rank);
  Tensor inverse = cpu::empty_like(parts.S);
  for (int64_t b = 0; b < batch; ++b) {
    const T* s = data<T>(parts.S) + b * n;
    const T limit = n > 0 ? data<T>(rcond)[b] * s[0] : 0;
    // 1 / NaN is NaN
    std::transform(s, s + n, mutable_data<T>(inverse) + b * n,
                   [&](T x) { return x <= limit ? 0 : 1 / x; });
  }
  const Tensor turned = aten<1>("aten::matmul", "", transpose(parts.U, -2, -1), B)[0];
  const Tensor scaled =
      aten<1>("aten::mul", "Tensor", turned, torch::stable::unsqueeze(inverse, -1))[0];
  return {dense(aten<1>("aten::matmul", "", parts.V, scaled)[0]), parts.S, rank, parts.info};
}

// R and Q^T B of a tall A = Q R. Of a single matrix, Q is applied as it stands, in reflectors.
std::tuple<Tensor, Tensor> factor_tall(const Tensor& A, const Tensor& B) {
  if (A.dim() > 2) {
    const auto [Q, R] = aten<2>("aten::linalg_qr", "", A, std::string("reduced"));
    return {R, aten<1>("aten::matmul", "", transpose(Q, -2, -1), B)[0]};
  }
  auto [reflectors, tau] = aten<2>("aten::geqrf", "", A);
  auto [C] = aten<1>("aten::ormqr", "", reflectors, tau, B, true, true);
  const int64_t n = A.size(-1);
  const Tensor top = torch::stable::narrow(reflectors, 0, 0, n);
  return {aten<1>("aten::triu", "", top, int64_t(0))[0], torch::stable::narrow(C, 0, 0, n)};
}

// By A = Q R, or A^T = Q R where A is wide. The singular values of R are those of A; their vectors
// are needed only where one of them does not count: nothing is returned then.
template <typename T>
std::optional<Solved> solve_by_qr(const Tensor& A, const Tensor& B, const Tensor& rcond,
                                  Tensor rank) {
  const bool wide = A.size(-2) < A.size(-1);
  Tensor Q, R, C = B;
  if (wide) {
    const auto found = aten<2>("aten::linalg_qr", "", transpose(A, -2, -1), std::string("reduced"));
    Q = found[0], R = found[1];
  } else {
    std::tie(R, C) = factor_tall(A, B);
  }
  const Decomposed parts = decompose(R, false, false);
  if (!count_values<T>(parts.S, rcond, rank)) return std::nullopt;
  Tensor X = aten<1>("aten::linalg_solve_triangular", "", wide ? transpose(R, -2, -1) : R, C, !wide,
                     true, false)[0];
  if (wide) X = aten<1>("aten::matmul", "", Q, X)[0];
  metalcore_variant = "qr";
  return Solved{dense(X), parts.S, rank, parts.info};
}

template <typename T>
Solved solve_batch(const Tensor& A, const Tensor& B, const Tensor& rcond) {
  const int64_t M = A.size(-2), N = A.size(-1), m = std::max(M, N), n = std::min(M, N);
  const int64_t dim = A.dim(), batch = rcond.numel();
  std::vector<int64_t> sizes(B.sizes().begin(), B.sizes().end());
  const Tensor rank = cpu::empty(sizes.data(), dim - 2, ScalarType::Long);
  const bool empty = B.numel() == 0 || n == 0;
  // many right sides are for matrix products
  if (empty || B.size(-1) > m || !side_by_side(m, n, batch, kLanes<T>)) {
    const auto solved = empty ? std::nullopt : solve_by_qr<T>(A, B, rcond, rank);
    return solved ? *solved : solve_by_vectors<T>(decompose(A, false, true), B, rcond, rank);
  }
  metalcore_variant = "interleaved";
  Solved out;
  sizes[dim - 2] = N;
  out.X = cpu::empty(sizes.data(), dim, A.scalar_type());
  sizes[dim - 2] = n;
  out.S = cpu::empty(sizes.data(), dim - 1, A.scalar_type());
  out.info = cpu::empty(sizes.data(), dim - 2, ScalarType::Int);
  out.rank = rank;
  const bool wide = M < N;
  solve_interleaved<T>(dense(wide ? transpose(A, -2, -1) : A), B, rcond, wide, out);
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> svd_solve(const Tensor& A_in, const Tensor& B_in,
                                                     const Tensor& rcond_in) {
  expect_system("svd_solve", A_in, B_in);
  STD_TORCH_CHECK(rcond_in.dim() == A_in.dim() - 2 && same_batch(rcond_in, A_in, rcond_in.dim()) &&
                      rcond_in.scalar_type() == A_in.scalar_type(),
                  "svd_solve: rcond must be [...], of the dtype and batch of A");
  const ScalarType given = A_in.scalar_type(), dtype = accumulate_dtype(given);
  const Tensor A = to_dtype(A_in, dtype), B = dense(to_dtype(B_in, dtype));
  const Tensor rcond = dense(to_dtype(rcond_in, dtype));
  const Solved out = dtype == ScalarType::Double ? solve_batch<double>(A, B, rcond)
                                                 : solve_batch<float>(A, B, rcond);
  return {to_dtype(out.X, given), to_dtype(out.S, given), out.rank, out.info};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("svd", kernel<&svd>);
  m.impl("svdvals", kernel<&svdvals>);
  m.impl("svd_solve", kernel<&svd_solve>);
}

}  // namespace metalcore::cpu
