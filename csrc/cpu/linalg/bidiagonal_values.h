// SPDX-License-Identifier: MIT
// Singular values of bidiagonal matrices, one per lane, by the differential qd algorithm with
// shifts (Fernando and Parlett): it works on the squares of the entries, without roots, and has one
// division per entry where a QR step has two and two roots. All lanes sweep in lock step; a lane
// that takes too many sweeps ends by bisection, so that every lane ends.
#pragma once

#include <utility>

#include "../common/policy.h"
#include "bidiagonal.h"

namespace metalcore::bidiagonal {

// Sweeps per singular value, of which 3 to 6 are usual, after which a lane is bisected.
inline const cpu::Knob sweeps_per_value("svd", "sweeps_per_value", 12);

// Squares of what is left of each lane's matrix: q of its diagonal, e of what is above, of columns
// [0, last]. The squares of its singular values are those wanted, less `removed`. Two registers
// before the first of q and e may be read, and one may be written, for lanes that are done; e is
// zero there.
template <typename T>
struct Qd {
  T *q, *e;
  Mask<T> last;
  Vec<T> removed, lost;  // `lost` is what the roundings of `removed` add up to
};

// The end of each lane's matrix.
template <typename T>
struct Tail {
  Vec<T> q, e, before;  // q[last], e[last - 1], q[last - 1]
};

// x[index] of each lane.
template <typename T>
inline Vec<T> pick(const T* x, Mask<T> index) {
  Vec<T> y;
#pragma GCC unroll 16
  for (int64_t l = 0; l < kLanes<T>; ++l) y[l] = x[index[l] * kLanes<T> + l];
  return y;
}

template <typename T>
inline void put(T* x, Mask<T> index, Vec<T> y) {
#pragma GCC unroll 16
  for (int64_t l = 0; l < kLanes<T>; ++l) x[index[l] * kLanes<T> + l] = y[l];
}

// Takes values off the end of lanes where they have converged: e is so small that without it no
// value moves by more than a rounding of itself, or of the largest one. Returns these lanes.
template <typename T>
Mask<T> deflate(Qd<T>& x, Tail<T>& t, Vec<T> negligible, T* values) {
  constexpr T kEpsilon = std::numeric_limits<T>::epsilon();
  Mask<T> moved = {};
  for (;;) {
    const Vec<T> value = x.removed + (t.q + x.lost), rounding = value * kEpsilon;
    const Mask<T> small =
        (t.e <= negligible) | ((t.e <= rounding) & (t.q * t.e <= rounding * rounding));
    const Mask<T> done = (x.last >= 0) & small;
    if (!lanes::any(done)) return moved;
    // too early for other lanes, which write there again
    put(values, x.last, value);
    x.last += done;
    t = {done ? t.before : t.q, pick(x.e, x.last - 1), pick(x.q, x.last - 1)};
    moved |= done;
  }
}

// What a sweep tells of each lane: the least of the d_i before the last, which is tail.q.
template <typename T>
struct Swept {
  Vec<T> least;
  Tail<T> tail;
};

// The squares of the entries of U, U^T U = B B^T - tau for the B of `from`, to q and e.
template <typename T>
Swept<T> sweep(const Qd<T>& from, Vec<T> tau, int64_t last, T* q, T* e) {
  const Vec<T> nothing = splat(kNothing<T>);
  Vec<T> d = at(from.q, 0) - tau;
  Swept<T> s = {splat(std::numeric_limits<T>::infinity()), {d, {}, {}}};
  for (int64_t i = 0; i < last; ++i) {
    const Mask<T> inside = Mask<T>{} + lanes::Int<T>(i) < from.last;
    s.least = inside ? lanes::min(s.least, d) : s.least;
    // a d of zero would lose what follows a zero of e
    d = lanes::max(d, nothing);
    const Vec<T> sum = d + at(from.e, i), ratio = at(from.q, i + 1) / sum;
    const Vec<T> product = at(from.e, i) * ratio;
    at(q, i) = sum;
    at(e, i) = product;
    d = d * ratio - tau;
    s.tail = {inside ? d : s.tail.q, inside ? product : s.tail.e, inside ? sum : s.tail.before};
  }
  put(q, from.last, s.tail.q);
  return s;
}

// The smaller eigenvalue of the last two rows of B B^T is no less than the least one of all, and a
// sweep with too large a shift is lost: with a little less there is a third fewer of them. The last
// factor is for equal eigenvalues: a shift that rounds to all of them leaves a d of zero, from
// which nothing is learned of the next shift.
template <typename T>
inline Vec<T> estimate(const Tail<T>& t) {
  const Vec<T> first = t.before + t.e, product = t.q * t.e;
  const Vec<T> half = lanes::abs(first - t.q) * T(0.5);
  const Vec<T> divisor = half + lanes::sqrt(half * half + product);
  const Vec<T> found = lanes::min(first, t.q) - product / lanes::max(divisor, splat(kNothing<T>));
  constexpr T kBelowRoundings = 1 - 64 * std::numeric_limits<T>::epsilon();
  return lanes::max((found - (t.q - found) * T(0.5)) * kBelowRoundings, Vec<T>{});
}

// Shifts of the sweeps: how far each lane has come with its own.
template <typename T>
struct Shifts {
  Vec<T> tau = {}, bound = {}, share = splat<T>(0.25);
  Mask<T> failures = {}, at_end = Mask<T>{} - 1;

  // For lanes whose matrix is new, or shorter than before.
  void choose(const Tail<T>& t) {
    const Vec<T> guess = estimate(t);
    const Vec<T> chosen = at_end ? guess : lanes::min(guess, share * bound);
    tau = failures == 0 ? chosen : tau;
  }

  // Lanes that are accepted: the least d is a bound of the next shift. Of the others, those that
  // failed at the end only know the least eigenvalue well: it is above tau + tail.q. Where `end`,
  // the last q, is one of a cluster, the next shift is as close to it as the cluster is wide.
  Mask<T> judge(const Swept<T>& s, Vec<T> end) {
    constexpr T kEpsilon = std::numeric_limits<T>::epsilon();
    const Mask<T> accepted = (s.least >= 0) & (s.tail.q >= 0);
    const Mask<T> late = (s.least >= 0) & (s.tail.q < 0) & (failures < 2);
    const Vec<T> wider = lanes::max(end - (end - tau) * T(16), Vec<T>{});
    const Vec<T> lower = lanes::max((tau + s.tail.q) * (1 - 2 * kEpsilon), wider);
    const Vec<T> smaller = failures < 4 ? lanes::max(tau * T(0.25), wider) : Vec<T>{};
    const Mask<T> ends = s.tail.q <= s.least,
                  inside = accepted & ~ends & (failures == 0) & (tau > 0);
    share = inside ? share + (1 - share) * T(0.33) : accepted ? splat<T>(0.25) : share;
    bound = accepted ? lanes::min(s.least, s.tail.q) : bound;
    at_end = accepted ? ends : at_end;
    tau = accepted ? tau : late ? lower : smaller;
    failures = accepted ? Mask<T>{} : failures + 1;
    return accepted;
  }
};

// How many squares of singular values are below the shift, per lane: B B^T - shift has as many
// negative pivots.
template <typename T>
Mask<T> count_below(const Qd<T>& x, Vec<T> shift, int64_t last, Vec<T> nothing) {
  Mask<T> count = {};
  Vec<T> d = at(x.q, 0) - shift;
  for (int64_t i = 0; i < last; ++i) {
    const Mask<T> inside = Mask<T>{} + lanes::Int<T>(i) < x.last;
    const Vec<T> sum = d + at(x.e, i), pivot = lanes::abs(sum) < nothing ? -nothing : sum;
    count -= inside & (pivot < 0);
    d = inside ? at(x.q, i + 1) * (d / pivot) - shift : d;
  }
  return count - (d < 0);
}

// All values of lanes that are not done, each to its last bit: halves intervals of bit patterns,
// which have the order of the numbers.
template <typename T>
void bisect(Qd<T>& x, Vec<T> largest, T* values) {
  const Vec<T> nothing = largest * kNothing<T>;
  int64_t last = -1;
  for (int64_t l = 0; l < kLanes<T>; ++l) last = std::max<int64_t>(last, x.last[l]);
  for (int64_t k = 0; k <= last; ++k) {
    const Mask<T> index = Mask<T>{} + lanes::Int<T>(k), wanted = x.last >= index;
    // the norm of B is at most the largest of d and of e together
    Mask<T> low = {}, high = simd::bits_as<Mask<T>>(largest * 4) & wanted;
    while (lanes::any(high - low > 1)) {
      const Mask<T> middle = low + ((high - low) >> 1);
      const Mask<T> above = count_below(x, simd::bits_as<Vec<T>>(middle), last, nothing) > index;
      high = above ? middle : high;
      low = above ? low : middle;
    }
    const Vec<T> value = x.removed + (simd::bits_as<Vec<T>>(low) + x.lost);
    put(values, wanted ? x.last - index : Mask<T>{} - 1, value);
  }
}

// Registers that `find_values` needs for itself.
inline int64_t values_registers(int64_t n) { return 5 * (n + 2); }

// The singular values of each lane's matrix, in any order, in place of its diagonal d.
template <typename T>
void find_values(T* d, const T* e, int64_t n, T* scratch) {
  constexpr int64_t L = kLanes<T>;
  constexpr T kEpsilon = std::numeric_limits<T>::epsilon();
  // small values converge at the end
  const Mask<T> flip = lanes::abs(at(d, 0)) < lanes::abs(at(d, n - 1));
  std::memset(scratch, 0, values_registers(n) * sizeof(Vec<T>));
  const auto part = [&](int64_t k) { return scratch + (k * (n + 2) + 2) * L; };
  Qd<T> x = {part(0), part(1), Mask<T>{} + lanes::Int<T>(n - 1), {}, {}};
  T *q = part(2), *next_e = part(3), *values = part(4);
  Vec<T> largest = {};
  for (int64_t i = 0; i < n; ++i) {
    const Vec<T> a = flip ? at(d, n - 1 - i) : at(d, i);
    at(x.q, i) = a * a;
    largest = lanes::max(largest, at(x.q, i));
    if (i + 1 == n) break;
    const Vec<T> b = flip ? at(e, n - 2 - i) : at(e, i);
    at(x.e, i) = b * b;
    largest = lanes::max(largest, at(x.e, i));
  }
  const Vec<T> negligible = largest * (kEpsilon * kEpsilon);
  Tail<T> tail = {at(x.q, n - 1), at(x.e, n - 2), at(x.q, n - 2)};
  Shifts<T> shifts;
  for (int64_t k = 0; k < sweeps_per_value * n; ++k) {
    shifts.at_end |= deflate(x, tail, negligible, values);
    int64_t last = -1;
    for (int64_t l = 0; l < L; ++l) last = std::max<int64_t>(last, x.last[l]);
    if (last < 0) break;
    shifts.choose(tail);
    const Vec<T> tau = shifts.tau;
    const Swept<T> swept = sweep(x, tau, last, q, next_e);
    const Mask<T> accepted = shifts.judge(swept, tail.q);
    const Vec<T> sum = x.removed + tau, added = sum - x.removed;
    x.lost += accepted ? (x.removed - (sum - added)) + (tau - added) : Vec<T>{};
    x.removed = accepted ? sum : x.removed;
    tail = {accepted ? swept.tail.q : tail.q, accepted ? swept.tail.e : tail.e,
            accepted ? swept.tail.before : tail.before};
    if (!lanes::any((x.last >= 0) & ~accepted)) {
      std::swap(x.q, q);
      std::swap(x.e, next_e);
      continue;
    }
    for (int64_t i = 0; i <= last; ++i) {
      at(x.q, i) = accepted ? at(q, i) : at(x.q, i);
      if (i < last) at(x.e, i) = accepted ? at(next_e, i) : at(x.e, i);
    }
  }
  bisect(x, largest, values);
  for (int64_t i = 0; i < n; ++i) at(d, i) = lanes::sqrt(lanes::max(at(values, i), Vec<T>{}));
}

}  // namespace metalcore::bidiagonal
