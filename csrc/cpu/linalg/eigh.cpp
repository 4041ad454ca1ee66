// SPDX-License-Identifier: MIT
// Eigenvalues and eigenvectors of symmetric matrices on the CPU. Small ones are made tridiagonal
// and then diagonal side by side, one per lane; large ones go to LAPACK, unless only their values
// are wanted.
//
// Rotations are kept until a buffer is full and then applied to a few rows of Q at a time, which
// stay in the first cache meanwhile.

#include <limits>
#include <numeric>
#include <tuple>

#include "../common/aten.h"
#include "../common/lanes.h"
#include "../common/policy.h"
#include "expect.h"
#include "ql.h"
#include "symmetric_values.h"
#include "tridiagonal.h"

namespace metalcore::cpu {
namespace {

using lanes::at;
using lanes::Mask;
using lanes::Ql;
using lanes::splat;
using lanes::Sweep;
using simd::kLanes;
using simd::Vec;

// Largest N that is decomposed side by side: for 3 matrices to half of the lanes,
const Knob interleaved_few_up_to("eigh", "interleaved_few_up_to", 64);
// for more,
const Knob interleaved_some_up_to("eigh", "interleaved_some_up_to", 128);
// for at least four times as many as there are lanes,
const Knob interleaved_many_up_to("eigh", "interleaved_many_up_to", 256);
// and where only eigenvalues are wanted.
const Knob values_interleaved_up_to("eigh", "values_interleaved_up_to", 512);
// Smallest N of which values alone are not left to LAPACK.
const Knob values_alone_from("eigh", "values_alone_from", 96);
// Rotations that are kept before they are applied to Q: as many as stay in a cache.
const Knob rotations_kept("eigh", "rotations_kept", 2048);

// QL steps per eigenvalue: two are usual.
constexpr int64_t kMaxSteps = 30;

// Rows of Q that are formed and rotated together: their registers hide the latency of each other.
constexpr int kRows = 4;

// Brings the lower triangle of each matrix to a largest element of 1/2 to 1, which is exact;
// `exponent` takes it back. A matrix with a NaN or an inf becomes zero.
template <typename T>
Mask<T> scale(T* a, int64_t n, int64_t ld, int* exponent) {
  Vec<T> largest = {}, poison = {};
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      const Vec<T> x = at(a, i * ld + j);
      largest = lanes::max(lanes::abs(x), largest);
      poison += x * splat<T>(0);
    }
  }
  const Mask<T> finite = poison == 0;
  Vec<T> first, second;
  for (int64_t l = 0; l < kLanes<T>; ++l) {
    exponent[l] = 0;
    if (finite[l]) std::frexp(largest[l], &exponent[l]);
    const PowerOfTwo<T> inverse(-exponent[l]);
    first[l] = inverse.first;
    second[l] = inverse.second;
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      Vec<T>& x = at(a, i * ld + j);
      x = finite ? x * first * second : Vec<T>{};
    }
  }
  return finite;
}

// Calls body(rows, first) over n rows, with the number of rows as a constant.
template <typename Body>
void for_each_rows(int64_t n, Body body) {
  int64_t first = 0;
  for (; first + kRows <= n; first += kRows) body(std::integral_constant<int, kRows>(), first);
  static_assert(kRows == 4);
  if (n - first == 3) body(std::integral_constant<int, 3>(), first);
  if (n - first == 2) body(std::integral_constant<int, 2>(), first);
  if (n - first == 1) body(std::integral_constant<int, 1>(), first);
}

// What the matrices of one group need: pointers into the workspace of the thread.
template <typename T>
struct Group {
  int64_t n, ld;
  T *a, *z, *tau, *d, *e, *w, *p, *rotations;
  double* ql;

  Group(int64_t n, bool vectors) : n(n), ld(lanes::padded(n)) {
    constexpr int64_t L = kLanes<T>;
    const int64_t kept = vectors ? 2 * capacity() : 0, square = n * ld;
    const int64_t doubles = Ql<T>::size(n) * int64_t(sizeof(double) / sizeof(T));
    a = lanes::workspace<T>((square * (vectors ? 2 : 1) + 5 * n + kept) * L + doubles);
    z = a + square * L;
    tau = z + (vectors ? square * L : 0);
    d = tau + n * L;
    e = d + n * L;
    w = e + n * L;
    p = w + n * L;
    rotations = p + n * L;
    ql = reinterpret_cast<double*>(rotations + kept * L);
  }

  int64_t capacity() const { return std::max<int64_t>(rotations_kept, n); }

  void apply(std::vector<Sweep>& sweeps, bool& formed) {
    for_each_rows(n, [&](auto rows, int64_t first) {
      if (!formed) lanes::rows_of_q<T, rows.value>(a, n, ld, tau, first, z);
      lanes::rotate_rows<T, rows.value>(sweeps, rotations, first, ld, z);
    });
    formed = true;
    sweeps.clear();
  }

  // Eigenvalues into `ql`, in no order, and eigenvectors into the columns of `z`. Returns whether
  // all lanes converged.
  bool solve(Ql<T>& values, bool vectors) {
    static thread_local std::vector<Sweep> sweeps;
    sweeps.clear();
    bool formed = false, converged = false;
    int64_t kept = 0;
    for (int64_t steps = 0; steps <= kMaxSteps * n; ++steps) {
      converged = !values.find_blocks();
      if (converged) break;
      if (!vectors) {
        values.step(nullptr);
        continue;
      }
      const int64_t length = values.high - values.low;
      if (kept + length > capacity()) {
        apply(sweeps, formed);
        kept = 0;
      }
      values.step(rotations + kept * 2 * kLanes<T>);
      sweeps.push_back({values.low, values.high, kept});
      kept += length;
    }
    if (vectors) apply(sweeps, formed);
    return converged;
  }
};

// Eigenvalues ascending to l [count][n], and where each of them was.
template <typename T>
void sort_values(const Ql<T>& values, int64_t n, int64_t count, const int* exponent,
                 std::vector<int32_t>& order, T* l) {
  order.resize(n * kLanes<T>);
  for (int64_t lane = 0; lane < count; ++lane) {
    int32_t* of = order.data() + lane * n;
    std::iota(of, of + n, 0);
    std::sort(of, of + n,
              [&](int32_t i, int32_t j) { return values.value(i, lane) < values.value(j, lane); });
    const PowerOfTwo<double> back(exponent[lane]);
    for (int64_t i = 0; i < n; ++i) {
      l[lane * n + i] = T(values.value(of[i], lane) * back.first * back.second);
      // from now on its place in a row of registers
      of[i] = int32_t(of[i] * kLanes<T> + lane);
    }
  }
}

// Columns of z in their order to q [count][n][n].
template <typename T>
void store_vectors(const T* z, int64_t n, int64_t ld, int64_t count,
                   const std::vector<int32_t>& order, T* q) {
  for (int64_t i = 0; i < n; ++i) {
    const T* row = z + i * ld * kLanes<T>;
    for (int64_t lane = 0; lane < count; ++lane) {
      const int32_t* of = order.data() + lane * n;
      T* to = q + (lane * n + i) * n;
      for (int64_t j = 0; j < n; ++j) to[j] = row[of[j]];
    }
  }
}

// Q is null where only values are wanted.
template <typename T>
void eigh_interleaved(const Tensor& A, Tensor& L, Tensor* Q, Tensor& info) {
  const int64_t n = A.size(-1), size = n * n;
  const T* a = data<T>(A);
  T *l = mutable_data<T>(L), *q = Q ? mutable_data<T>(*Q) : nullptr;
  int32_t* failed = mutable_data<int32_t>(info);
  // empty matrices have no values to look for
  const int64_t batch = n == 0 ? 0 : info.numel();
  lanes::for_each_group<T>(batch, 9 * n * n * n, [&](int64_t first, int64_t count) {
    Group<T> group(n, q != nullptr);
    int exponent[kLanes<T>];
    lanes::pack_matrix(a + first * size, n, n, group.ld, size, count, group.a);
    const Mask<T> finite = scale(group.a, n, group.ld, exponent);
    lanes::tridiagonalise(group.a, n, group.ld, group.tau, group.d, group.e, group.w, group.p);
    Ql<T> values(group.d, group.e, n, group.ql);
    const bool converged = group.solve(values, q != nullptr);
    static thread_local std::vector<int32_t> order;
    sort_values(values, n, count, exponent, order, l + first * n);
    if (q) store_vectors(group.z, n, group.ld, count, order, q + first * size);
    for (int64_t i = 0; i < count; ++i) {
      failed[first + i] = finite[i] && converged ? 0 : int32_t(n);
      if (finite[i]) continue;
      constexpr T kNaN = std::numeric_limits<T>::quiet_NaN();
      std::fill_n(l + (first + i) * n, n, kNaN);
      if (q) std::fill_n(q + (first + i) * size, size, kNaN);
    }
  });
}

// Which matrices have a NaN or an inf in the lower triangle; these become zero in `A`.
template <typename T>
bool clear_poisoned(Tensor& A, Tensor& info) {
  const int64_t n = A.size(-1);
  const T* a = data<T>(A);
  int32_t* failed = mutable_data<int32_t>(info);
  bool any = false;
  for (int64_t b = 0; b < info.numel(); ++b) {
    T poison = 0;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j <= i; ++j) poison += a[(b * n + i) * n + j] * T(0);
    }
    failed[b] = poison == 0 ? 0 : int32_t(n);
    any |= failed[b] != 0;
  }
  if (!any) return false;
  A = torch::stable::clone(A);
  for (int64_t b = 0; b < info.numel(); ++b) {
    if (failed[b]) std::fill_n(mutable_data<T>(A) + b * n * n, n * n, T(0));
  }
  return true;
}

// LAPACK may not come back from a NaN, and torch raises for it: poisoned matrices are left out.
template <typename T>
void eigh_lapack(Tensor A, Tensor& L, Tensor* Q, Tensor& info) {
  const int64_t n = A.size(-1);
  const bool poisoned = clear_poisoned<T>(A, info);
  const auto [values, vectors] =
      aten<2>("aten::_linalg_eigh", "", A, std::string("L"), Q != nullptr);
  L = dense(values);
  if (Q) *Q = dense(vectors);
  if (!poisoned) return;
  constexpr T kNaN = std::numeric_limits<T>::quiet_NaN();
  for (int64_t b = 0; b < info.numel(); ++b) {
    if (!data<int32_t>(info)[b]) continue;
    std::fill_n(mutable_data<T>(L) + b * n, n, kNaN);
    if (Q) std::fill_n(mutable_data<T>(*Q) + b * n * n, n * n, kNaN);
  }
}

// Values of matrices one by one, each by all threads.
template <typename T>
void eigvalsh_alone(const Tensor& A, Tensor& L, Tensor& info) {
  const int64_t n = A.size(-1);
  for (int64_t b = 0; b < info.numel(); ++b) {
    const bool finite = symmetric_values(data<T>(A) + b * n * n, n, mutable_data<T>(L) + b * n);
    mutable_data<int32_t>(info)[b] = finite ? 0 : int32_t(n);
  }
}

// The largest n of a batch that is worth lanes, the more of which are idle the smaller it is.
int64_t largest_interleaved(int64_t batch, int64_t lanes, bool vectors) {
  if (batch < 3) return 0;
  if (batch * 2 <= lanes) return interleaved_few_up_to;
  if (!vectors) return values_interleaved_up_to;
  return batch < 4 * lanes ? interleaved_some_up_to : interleaved_many_up_to;
}

Tensor decompose(const Tensor& A_in, bool upper, Tensor& L, Tensor* Q) {
  const ScalarType dtype = accumulate_dtype(A_in.scalar_type());
  const Tensor A = dense(to_dtype(upper ? torch::stable::transpose(A_in, -2, -1) : A_in, dtype));
  const int64_t n = A.size(-1), batch = n == 0 ? 0 : A.numel() / (n * n);
  const bool in_double = dtype == ScalarType::Double;
  const int64_t lanes = MC_REGISTER_BYTES / (in_double ? 8 : 4);
  Tensor info = cpu::empty(A.sizes().data(), A.dim() - 2, ScalarType::Int);
  if (n == 0) torch::stable::zero_(info);
  if (n <= largest_interleaved(batch, lanes, Q != nullptr)) {
    metalcore_variant = "interleaved";
    L = cpu::empty(A.sizes().data(), A.dim() - 1, dtype);
    if (Q) *Q = cpu::empty_like(A);
    in_double ? eigh_interleaved<double>(A, L, Q, info) : eigh_interleaved<float>(A, L, Q, info);
  } else if (!Q && n >= values_alone_from) {
    metalcore_variant = "alone";
    L = cpu::empty(A.sizes().data(), A.dim() - 1, dtype);
    in_double ? eigvalsh_alone<double>(A, L, info) : eigvalsh_alone<float>(A, L, info);
  } else {
    metalcore_variant = "lapack";
    in_double ? eigh_lapack<double>(A, L, Q, info) : eigh_lapack<float>(A, L, Q, info);
  }
  L = to_dtype(L, A_in.scalar_type());
  if (Q) *Q = to_dtype(*Q, A_in.scalar_type());
  return info;
}

std::tuple<Tensor, Tensor, Tensor> eigh(const Tensor& A, bool upper) {
  expect_square("eigh", A);
  Tensor L, Q;
  const Tensor info = decompose(A, upper, L, &Q);
  return {L, Q, info};
}

std::tuple<Tensor, Tensor> eigvalsh(const Tensor& A, bool upper) {
  expect_square("eigvalsh", A);
  Tensor L;
  const Tensor info = decompose(A, upper, L, nullptr);
  return {L, info};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("eigh", kernel<&eigh>);
  m.impl("eigvalsh", kernel<&eigvalsh>);
}

}  // namespace metalcore::cpu
