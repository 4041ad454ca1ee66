// SPDX-License-Identifier: MIT
// QR on the CPU. Small matrices are factored side by side, one per lane, by pairs of Householder
// reflectors; large ones by LAPACK.

#include <string>
#include <tuple>
#include <vector>

#include "../common/aten.h"
#include "../common/policy.h"
#include "../common/text.h"
#include "expect.h"
#include "householder.h"

namespace metalcore::cpu {
namespace {

using lanes::at;
using lanes::Reflectors;
using simd::kLanes;
using simd::Vec;

// Largest N of N x N matrices (or of as many values) that are factored side by side,
const Knob interleaved_up_to("qr", "interleaved_up_to", 128);
// and of single ones, where most lanes are idle.
const Knob interleaved_alone_up_to("qr", "interleaved_alone_up_to", 16);
// LAPACK factors lanes * (N + 16) / lapack_speed matrices in the time of one group of lanes.
const Knob lapack_speed("qr", "lapack_speed", 128);

// Reflector k of column k stands below the diagonal, its tau in t[2 k]; t[2 k + 1] has v_k^T
// v_{k+1} for even k.
template <typename T>
void factor(T* w, int64_t m, int64_t n, int64_t ld, T* t) {
  constexpr int64_t L = kLanes<T>;
  const int64_t steps = std::min(m, n);
  for (int64_t k = 0; k < steps; k += 2) {
    T* x = w + (k * ld + k) * L;
    const int64_t rows = m - k;
    const Vec<T> tau = at(t, 2 * k) = lanes::reflect(x, ld, rows);
    const Reflectors<T, 1> one = {x, ld, 1, {tau}, {}};
    if (k + 1 == steps) {
      lanes::apply_left<true>(one, x + L, ld, 1, rows, n - k - 1);
      break;
    }
    // the next column first: it gives the second reflector of the pair
    const Vec<T> y = tau * (at(x, 1) + lanes::dot(x + ld * L, ld, x + (ld + 1) * L, ld, rows - 1));
    at(x, 1) -= y;
    for (int64_t i = 1; i < rows; ++i) at(x, i * ld + 1) -= at(x, i * ld) * y;
    const Vec<T> next = at(t, 2 * k + 2) = lanes::reflect(x + (ld + 1) * L, ld, rows - 1);
    const Vec<T> both =
        at(x, ld) + lanes::dot(x + 2 * ld * L, ld, x + (2 * ld + 1) * L, ld, rows - 2);
    at(t, 2 * k + 1) = both;
    const Reflectors<T, 2> pair = {x, ld, 1, {tau, next}, -tau * next * both};
    lanes::apply_left<true>(pair, x + 2 * L, ld, 1, rows, n - k - 2);
  }
}

// Columns 0.. of the product of the reflectors in the place of these, from the last pair on.
template <typename T>
void form(T* w, int64_t m, int64_t columns, int64_t steps, int64_t ld, const T* t) {
  constexpr int64_t L = kLanes<T>;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = steps; j < columns; ++j) at(w, i * ld + j) = lanes::splat<T>(i == j);
  }
  for (int64_t k = (steps + 1) / 2 * 2 - 2; k >= 0; k -= 2) {
    T* x = w + (k * ld + k) * L;
    const int64_t rows = m - k;
    const Vec<T> tau = at(t, 2 * k);
    if (k + 1 == steps) {
      const Reflectors<T, 1> one = {x, ld, 1, {tau}, {}};
      lanes::apply_left<false>(one, x + L, ld, 1, rows, columns - steps);
      at(x, 0) = 1 - tau;
      for (int64_t i = 1; i < rows; ++i) at(x, i * ld) *= -tau;
      continue;
    }
    const Vec<T> next = at(t, 2 * k + 2), both = at(t, 2 * k + 1);
    const Reflectors<T, 2> pair = {x, ld, 1, {tau, next}, -tau * next * both};
    // rows of the identity that no later reflector has touched
    lanes::apply_left<false, true>(pair, x + 2 * L, ld, 1, rows, columns - k - 2);
    const Vec<T> y = tau * (at(x, ld) - next * both);
    at(x, 0) = 1 - tau;
    at(x, 1) = -y;
    at(x, ld + 1) = 1 - next - y * at(x, ld);
    at(x, ld) *= -tau;
    for (int64_t i = 2; i < rows; ++i) {
      const Vec<T> v = at(x, i * ld);
      at(x, i * ld + 1) = -(next * at(x, i * ld + 1) + y * v);
      at(x, i * ld) = -tau * v;
    }
  }
}

// The triangle of rows 0.., dense.
template <typename T>
void copy_upper(const T* w, int64_t rows, int64_t n, int64_t ld, T* r) {
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t zeros = std::min(i, n);
    for (int64_t j = 0; j < zeros; ++j) at(r, i * n + j) = Vec<T>{};
    for (int64_t j = zeros; j < n; ++j) at(r, i * n + j) = at(w, i * ld + j);
  }
}

template <typename T>
void qr_interleaved(const Tensor& A, Tensor& Q, Tensor& R, int64_t batch) {
  constexpr int64_t L = kLanes<T>;
  const int64_t m = A.size(-2), n = A.size(-1), columns = Q.size(-1), rows = R.size(-2);
  const int64_t steps = std::min(m, n), ld = lanes::padded(std::max(n, columns));
  const T* a = data<T>(A);
  T *q = mutable_data<T>(Q), *r = mutable_data<T>(R);
  lanes::for_each_group<T>(batch, 4 * m * n * steps, [&](int64_t first, int64_t count) {
    T* w = lanes::workspace<T>((m * ld + rows * n + 2 * steps) * L);
    T *upper = w + m * ld * L, *t = upper + rows * n * L;
    lanes::pack_matrix(a + first * m * n, m, n, ld, m * n, count, w);
    factor(w, m, n, ld, t);
    copy_upper(w, rows, n, ld, upper);
    lanes::unpack(upper, rows * n, rows * n, count, r + first * rows * n);
    if (columns == 0) return;
    form(w, m, columns, steps, ld, t);
    lanes::unpack_matrix(w, m, columns, ld, m * columns, count, q + first * m * columns);
  });
}

// Whether lanes are ahead of LAPACK, for matrices of `size` x `size` or as many values. All lanes
// together take as long as one of so many matrices takes LAPACK.
bool side_by_side(int64_t batch, int64_t size, int64_t lanes) {
  const bool worth = batch >= lanes || batch * lapack_speed >= lanes * (size + 16);
  return size <= interleaved_alone_up_to || (worth && size <= interleaved_up_to);
}

std::tuple<Tensor, Tensor> qr(const Tensor& A_in, StringHandle mode_in) {
  const std::string mode = taken(mode_in);
  expect_matrices("qr", A_in);
  STD_TORCH_CHECK(mode == "reduced" || mode == "complete" || mode == "r",
                  "qr: mode must be reduced, complete or r, got ", mode);
  const ScalarType dtype = accumulate_dtype(A_in.scalar_type());
  const Tensor A = to_dtype(A_in, dtype);
  const int64_t m = A.size(-2), n = A.size(-1), steps = std::min(m, n);
  std::vector<int64_t> q_size = A.sizes().vec(), r_size = q_size;
  q_size.back() = mode == "complete" ? m : mode == "r" ? 0 : steps;
  r_size[r_size.size() - 2] = mode == "complete" ? m : steps;
  int64_t batch = 1;
  for (int64_t d = 0; d < A.dim() - 2; ++d) batch *= A.size(d);
  Tensor Q = cpu::empty(q_size.data(), A.dim(), dtype), R;
  const auto size = int64_t(std::sqrt(double(m) * double(std::max(n, q_size.back()))));
  if (side_by_side(batch, size, MC_REGISTER_BYTES / (dtype == ScalarType::Double ? 8 : 4))) {
    metalcore_variant = "interleaved";
    R = cpu::empty(r_size.data(), A.dim(), dtype);
    if (dtype == ScalarType::Double) {
      qr_interleaved<double>(dense(A), Q, R, batch);
    } else {
      qr_interleaved<float>(dense(A), Q, R, batch);
    }
  } else {
    metalcore_variant = "lapack";
    const auto [q, r] = aten<2>("aten::linalg_qr", "", A, mode);
    if (mode != "r") Q = q;
    R = r;
  }
  return {to_dtype(dense(Q), A_in.scalar_type()), to_dtype(dense(R), A_in.scalar_type())};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) { m.impl("qr", kernel<&qr>); }

}  // namespace metalcore::cpu
