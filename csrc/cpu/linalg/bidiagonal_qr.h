// SPDX-License-Identifier: MIT
// Implicit QR steps on bidiagonal matrices, one per lane, all lanes in lock step: a lane whose
// block starts later or ends earlier than another's takes identity rotations there. Rotations of
// several steps are kept and then applied to a panel pair at a time, which stays in the nearest
// cache.
#pragma once

#include "bidiagonal.h"

namespace metalcore::bidiagonal {

// A rotation [c s; -s c] with c >= 0 as three shears: half = tan(angle / 2). Three fused
// operations per value in place of four.
template <typename T>
struct Rotation {
  Vec<T> half, s;
};

// The rotation that maps (f, g) to (r, 0).
template <typename T>
inline void rotation(Vec<T> f, Vec<T> g, Vec<T>& c, Vec<T>& s, Vec<T>& r) {
  const Vec<T> squares = f * f + g * g;
  const Mask<T> some = squares > kNothing<T>;
  const Vec<T> norm = lanes::sqrt(squares);
  const Vec<T> inverse = some ? splat<T>(1) / norm : Vec<T>{};
  c = some ? lanes::abs(f) * inverse : splat<T>(1);
  s = g * lanes::copysign(inverse, f);
  r = some ? lanes::copysign(norm, f) : f;
}

// Columns i and i + 1 of `Pair` panels for each rotation i in [first, last).
template <int Pair, typename T>
inline void rotate_panels(T* x, T* y, const Rotation<T>* rotations, int64_t first, int64_t last) {
  Vec<T> kept[Pair * kRows];
  for (int64_t r = 0; r < Pair * kRows; ++r) {
    kept[r] = at(r < kRows ? x : y, first * kRows + r % kRows);
  }
  for (int64_t i = first; i < last; ++i) {
    const Vec<T> half = rotations[i - first].half, s = rotations[i - first].s;
#pragma GCC unroll 8
    for (int64_t r = 0; r < Pair * kRows; ++r) {
      T* w = r < kRows ? x : y;
      Vec<T> b = at(w, (i + 1) * kRows + r % kRows);
      const Vec<T> a = kept[r] + half * b;
      b -= s * a;
      at(w, i * kRows + r % kRows) = a + half * b;
      kept[r] = b;
    }
  }
  for (int64_t r = 0; r < Pair * kRows; ++r) {
    at(r < kRows ? x : y, last * kRows + r % kRows) = kept[r];
  }
}

// Rotations of up to kSteps QR steps, waiting to be applied to Q and P.
template <typename T>
class Pending {
 public:
  static constexpr int64_t kSteps = 8;
  // Registers it needs for n columns.
  static int64_t registers(int64_t n) { return 2 * kCapacity(n) * 2; }

  Pending(T* memory, int64_t n, const Panels<T>& q, const Panels<T>& p)
      : q_(q), p_(p), capacity_(kCapacity(n)) {
    left_ = reinterpret_cast<Rotation<T>*>(memory);
    right_ = left_ + capacity_;
  }

  // Room for a step over columns [first, last]; the caller fills left() and right().
  void begin(int64_t first, int64_t last) {
    if (count_ == kSteps || used_ + last - first > capacity_) flush();
    step_[count_++] = {first, last, used_};
    used_ += last - first;
  }
  Rotation<T>* left() { return left_ + step_[count_ - 1].offset; }
  Rotation<T>* right() { return right_ + step_[count_ - 1].offset; }

  void flush() {
    apply(q_, left_);
    apply(p_, right_);
    count_ = used_ = 0;
  }

 private:
  struct Step {
    int64_t first, last, offset;
  };

  // 128 rotations of one side fill a quarter of the nearest cache with AVX2.
  static int64_t kCapacity(int64_t n) { return std::max<int64_t>(128, n); }

  void apply(const Panels<T>& x, const Rotation<T>* rotations) const {
    int64_t p = 0;
    for (; p + 1 < panels(x.rows); p += 2) {
      for (int64_t k = 0; k < count_; ++k) {
        rotate_panels<2>(x.panel(p), x.panel(p + 1), rotations + step_[k].offset, step_[k].first,
                         step_[k].last);
      }
    }
    if (p < panels(x.rows)) {
      for (int64_t k = 0; k < count_; ++k) {
        rotate_panels<1>(x.panel(p), x.panel(p), rotations + step_[k].offset, step_[k].first,
                         step_[k].last);
      }
    }
  }

  Panels<T> q_, p_;
  int64_t capacity_;
  Rotation<T>*left_, *right_;
  Step step_[kSteps];
  int64_t count_ = 0, used_ = 0;
};

// The last block of each lane that is not diagonal yet: columns lo to hi, and what its shift needs.
template <typename T>
struct Blocks {
  Mask<T> active = {}, lo = {}, hi = {};
  Vec<T> before = {}, above = {}, corner = {}, smallest = {};
};

// Drops entries of e that are negligible beside the whole matrix and finds the blocks.
template <typename T>
inline Blocks<T> find_blocks(const T* d, T* e, int64_t n, Vec<T> negligible) {
  Blocks<T> b;
  Mask<T> start = {};
  Vec<T> smallest = lanes::abs(at(d, 0));
  for (int64_t i = 0; i + 1 < n; ++i) {
    const Mask<T> keep = lanes::abs(at(e, i)) > negligible;
    at(e, i) = keep ? at(e, i) : Vec<T>{};
    const Vec<T> next = lanes::abs(at(d, i + 1));
    smallest = keep ? lanes::min(smallest, next) : next;
    b.active |= keep;
    b.lo = keep ? start : b.lo;
    b.hi = keep ? Mask<T>{} + lanes::Int<T>(i + 1) : b.hi;
    b.before = keep ? at(d, i) : b.before;
    b.above = keep ? at(e, i) : b.above;
    b.corner = keep ? at(d, i + 1) : b.corner;
    b.smallest = keep ? smallest : b.smallest;
    start = keep ? start : Mask<T>{} + lanes::Int<T>(i + 1);
  }
  return b;
}

// The smaller singular value of [f g; 0 h].
template <typename T>
inline Vec<T> smaller_singular_value(Vec<T> f, Vec<T> g, Vec<T> h) {
  f = lanes::abs(f), h = lanes::abs(h);
  const Vec<T> sum = f + h, difference = f - h;
  return (f * h + f * h) /
         (lanes::sqrt(sum * sum + g * g) + lanes::sqrt(difference * difference + g * g));
}

// The sine is that of the rounded `half`, so that the shears make a rotation to the last bit.
template <typename T>
inline Rotation<T> shears(Mask<T> active, Vec<T> c, Vec<T> s) {
  const Vec<T> half = (active ? s : Vec<T>{}) / (splat<T>(1) + c);
  return {half, (half + half) / (splat<T>(1) + half * half)};
}

// One QR step on columns [first, last] of every active lane. With ZeroShift the form that also
// carries zeros on the diagonal to the end of the block (Demmel and Kahan).
template <bool ZeroShift, typename T>
void step(T* d, T* e, const Blocks<T>& b, int64_t first, int64_t last, Pending<T>& pending) {
  pending.begin(first, last);
  const Vec<T> one = splat<T>(1);
  const Vec<T> shift = smaller_singular_value<T>(b.before, b.above, b.corner);
  Vec<T> f = {}, g = {}, oldc = one, olds = {};
  for (int64_t i = first; i < last; ++i) {
    const Mask<T> index = Mask<T>{} + lanes::Int<T>(i);
    const Mask<T> starts = b.lo == index, active = b.active & (b.lo <= index) & (index < b.hi);
    const Mask<T> ends = active & (b.hi == index + 1);
    const Vec<T> di = at(d, i), ei = at(e, i), next = at(d, i + 1);
    if (ZeroShift) {
      f = starts ? di : f;
      g = ei;
      oldc = starts ? one : oldc;
    } else {
      const Vec<T> safe = di == 0 ? one : di;
      f = starts ? (lanes::abs(di) - shift) * (lanes::copysign(one, di) + shift / safe) : f;
      g = starts ? ei : g;
    }
    Vec<T> cr, sr, cl, sl, r, diagonal;
    rotation<T>(f, g, cr, sr, r);
    const Mask<T> inner = active & ~starts;
    if (i > first) at(e, i - 1) = inner ? (ZeroShift ? olds * r : r) : at(e, i - 1);
    Vec<T> here = {}, below = next;
    if (ZeroShift) {
      rotation<T>(oldc * r, next * sr, cl, sl, diagonal);
      f = next * cr;
      oldc = cl, olds = sl;
      here = f * sl, below = ends ? f * cl : next;
    } else {
      const Vec<T> turned = cr * ei - sr * di;
      rotation<T>(cr * di + sr * ei, sr * next, cl, sl, diagonal);
      f = cl * turned + sl * (cr * next);
      below = cl * (cr * next) - sl * turned;
      here = f;
      if (i + 1 < last) {
        const Mask<T> goes_on = active & ~ends;
        g = sl * at(e, i + 1);
        at(e, i + 1) = goes_on ? cl * at(e, i + 1) : at(e, i + 1);
      }
    }
    at(d, i) = active ? diagonal : di;
    at(d, i + 1) = active ? below : next;
    at(e, i) = ends ? here : at(e, i);
    pending.left()[i - first] = shears<T>(active, cl, sl);
    pending.right()[i - first] = shears<T>(active, cr, sr);
  }
}

// Makes B diagonal. Returns the lanes that did not converge.
template <typename T>
Mask<T> diagonalize(T* d, T* e, int64_t n, Pending<T>& pending) {
  constexpr int64_t kStepsPerValue = 30;
  Vec<T> largest = {};
  for (int64_t i = 0; i < n; ++i) {
    largest = lanes::max(largest, lanes::max(lanes::abs(at(d, i)), lanes::abs(at(e, i))));
  }
  const Vec<T> negligible = largest * (2 * std::numeric_limits<T>::epsilon());
  Blocks<T> b;
  for (int64_t k = 0; k < kStepsPerValue * n; ++k) {
    b = find_blocks(d, e, n, negligible);
    int64_t first = n, last = 0;
    for (int64_t l = 0; l < kLanes<T>; ++l) {
      if (!b.active[l]) continue;
      first = std::min<int64_t>(first, b.lo[l]);
      last = std::max<int64_t>(last, b.hi[l]);
    }
    if (first > last) break;
    if (lanes::any(b.active & (b.smallest <= negligible))) {
      step<true>(d, e, b, first, last, pending);
    } else {
      step<false>(d, e, b, first, last, pending);
    }
  }
  pending.flush();
  return b.active;
}

}  // namespace metalcore::bidiagonal
