// SPDX-License-Identifier: MIT
// Eigenvalues of symmetric tridiagonal matrices side by side: implicit QL steps, each lane on its
// own unreduced block. All lanes step together; a rotation outside a lane's block is none.
//
// Arithmetic is in double for float matrices too: a step waits for its square root rather than for
// the width of registers, so that this costs little, and the rotations are then right to the bit.
#pragma once

#include <vector>

#include "../common/lanes.h"

namespace metalcore::lanes {

// The rotations of one step: on columns i and i + 1 for i = high - 1 down to low, as pairs (c, s)
// of registers from `first` on.
struct Sweep {
  int64_t low, high, first;
};

template <typename T>
class Ql {
 public:
  static constexpr int64_t kLanesOfPart = kLanes<double>;
  static constexpr int64_t kParts = kLanes<T> / kLanesOfPart;

  // Doubles that d and e of matrices of order n take.
  static int64_t size(int64_t n) { return 2 * n * kLanes<T>; }

  Ql(const T* diagonal, const T* beside, int64_t n, double* memory)
      : n(n), d(memory), e(memory + n * kLanes<T>) {
    for (int64_t i = 0; i < n * kLanes<T>; ++i) {
      d[i] = diagonal[i];
      e[i] = i < (n - 1) * kLanes<T> ? beside[i] : 0;
    }
  }

  double value(int64_t i, int64_t lane) const { return d[i * kLanes<T> + lane]; }

  // Finds the block of each lane that the next step works on; false where none is left.
  bool find_blocks() {
    // what is left out is less than rounding to T changes
    constexpr double kLeft = std::is_same_v<T, double> ? 0x1p-54 : 0x1p-27;
    low = n - 1;
    high = 0;
    for (int64_t p = 0; p < kParts; ++p) {
      Index first = Index{} + (n - 1), last = first, bound = first;
      Vec<double> above = lanes::abs(part(d, n - 1, p));
      for (int64_t i = n - 2; i >= done; --i) {
        const Vec<double> here = lanes::abs(part(d, i, p));
        const Index is_small = lanes::abs(part(e, i, p)) <= kLeft * (here + above) + kLeft / 8;
        const Index at_i = Index{} + i;
        first = is_small ? first : at_i;
        last = is_small ? last : bound;
        bound = is_small ? at_i : bound;
        above = here;
      }
      for (int64_t l = 0; l < kLanesOfPart; ++l) {
        begin[p * kLanesOfPart + l] = first[l];
        end[p * kLanesOfPart + l] = last[l];
        low = std::min<int64_t>(low, first[l]);
        high = std::max<int64_t>(high, last[l]);
      }
    }
    done = low;
    return low < n - 1;
  }

  // One step on the blocks that were found. `rotations` gets high - low pairs, unless it is null.
  void step(T* rotations) {
    alignas(64) double at_begin[3][kLanes<T>], at_end[kLanes<T>];
    for (int64_t l = 0; l < kLanes<T>; ++l) {
      const int64_t i = std::min(begin[l], n - 2) * kLanes<T> + l;
      at_begin[0][l] = d[i];
      at_begin[1][l] = d[i + kLanes<T>];
      at_begin[2][l] = e[i];
      at_end[l] = d[end[l] * kLanes<T> + l];
    }
    State state[kParts];
    for (int64_t p = 0; p < kParts; ++p) {
      const Vec<double> d0 = part(at_begin[0], 0, p), e0 = part(at_begin[2], 0, p);
      const Vec<double> ratio = (part(at_begin[1], 0, p) - d0) / (e0 + e0);
      const Vec<double> root = lanes::sqrt(ratio * ratio + splat<double>(1));
      // the eigenvalue of the first 2 x 2 block that is nearer to its first element
      const Vec<double> shift = d0 - e0 / (ratio + lanes::copysign(root, ratio));
      state[p] = {part(at_end, 0, p) - shift,
                  splat<double>(1),
                  splat<double>(1),
                  Vec<double>{},
                  load(begin, p),
                  load(end, p)};
    }
    for (int64_t i = high - 1; i >= low; --i) {
      for (int64_t p = 0; p < kParts; ++p) {
        rotate(state[p], i, p, rotations);
      }
      if (rotations) rotations += 2 * kLanes<T>;
    }
    for (int64_t l = 0; l < kLanes<T>; ++l) {
      if (begin[l] == end[l]) continue;
      const int64_t i = begin[l] * kLanes<T> + l, p = l / kLanesOfPart, k = l % kLanesOfPart;
      d[i] -= state[p].moved[k];
      e[i] = state[p].g[k];
    }
  }

  int64_t low = 0, high = 0;

 private:
  using Index = Mask<double>;
  typedef T Half __attribute__((vector_size(kLanesOfPart * sizeof(T))));

  struct State {
    Vec<double> g, c, s, moved;
    Index begin, end;
  };

  static Vec<double>& part(double* x, int64_t i, int64_t p) {
    return *reinterpret_cast<Vec<double>*>(x + i * kLanes<T> + p * kLanesOfPart);
  }

  static Index load(const int64_t* x, int64_t p) {
    return simd::load_as<Index>(x + p * kLanesOfPart);
  }

  // Chases the bulge from between i + 1 and i + 2 to between i and i + 1.
  inline void rotate(State& is, int64_t i, int64_t p, T* rotations) {
    const Index at_i = Index{} + i;
    const Index on = (at_i < is.end) & (at_i >= is.begin);
    const Vec<double> ei = part(e, i, p), f = is.s * ei, b = is.c * ei;
    const Vec<double> square = f * f + is.g * is.g;
    // what cannot be squared is as good as zero, and nothing needs to be rotated
    const Index rotates = on & (square > 1e-290);
    const Vec<double> r = lanes::sqrt(square), one = splat<double>(1);
    // sooner, as it does not wait for the root, but two roundings more: for float these are nothing
    const Vec<double> inverse = std::is_same_v<T, double> ? one / r : r * (one / square);
    const Vec<double> c = rotates ? is.g * inverse : splat<double>(1);
    const Vec<double> s = rotates ? f * inverse : Vec<double>{};
    Vec<double>&d1 = part(d, i + 1, p), &e1 = part(e, i + 1, p);
    const Vec<double> g = d1 - is.moved;
    const Vec<double> t = (part(d, i, p) - g) * s + c * (b + b), moved = s * t;
    e1 = on ? (at_i + 1 < is.end ? r : Vec<double>{}) : e1;
    d1 = on ? g + moved : d1;
    is.g = on ? c * t - b : is.g;
    is.c = on ? c : is.c;
    is.s = on ? s : is.s;
    is.moved = on ? moved : is.moved;
    if (rotations) {
      const Half narrow[2] = {__builtin_convertvector(c, Half), __builtin_convertvector(s, Half)};
      std::memcpy(rotations + p * kLanesOfPart, &narrow[0], sizeof(Half));
      std::memcpy(rotations + kLanes<T> + p * kLanesOfPart, &narrow[1], sizeof(Half));
    }
  }

  const int64_t n;
  double *const d, *const e;
  int64_t done = 0;
  alignas(64) int64_t begin[kLanes<T>], end[kLanes<T>];
};

// Rotates columns of rows first.. of z (ld apart) by the sweeps in turn.
template <typename T, int Rows>
void rotate_rows(const std::vector<Sweep>& sweeps, const T* rotations, int64_t first, int64_t ld,
                 T* z) {
  T* of[Rows];
  for (int r = 0; r < Rows; ++r) of[r] = z + (first + r) * ld * kLanes<T>;
  for (const Sweep& sweep : sweeps) {
    Vec<T> carried[Rows];
    for (int r = 0; r < Rows; ++r) carried[r] = at(of[r], sweep.high);
    const T* cs = rotations + sweep.first * 2 * kLanes<T>;
    for (int64_t i = sweep.high - 1; i >= sweep.low; --i, cs += 2 * kLanes<T>) {
      const Vec<T> c = at(cs, 0), s = at(cs, 1);
      for (int r = 0; r < Rows; ++r) {
        const Vec<T> x = at(of[r], i);
        at(of[r], i + 1) = s * x + c * carried[r];
        carried[r] = c * x - s * carried[r];
      }
    }
    for (int r = 0; r < Rows; ++r) at(of[r], sweep.low) = carried[r];
  }
}

}  // namespace metalcore::lanes
