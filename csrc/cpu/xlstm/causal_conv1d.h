// SPDX-License-Identifier: MIT
// What the causal convolution and its gradient share: sizes, weights, steps, and their sums.
#pragma once

#include <tuple>
#include <vector>

#include "../common/lanes.h"
#include "../train/activation.h"

namespace metalcore::cpu::conv {

using simd::Acc;

constexpr int64_t kMostTaps = 8, kChannels = 512, kSteps = 128;
// Steps whose sums are in registers at once: with Pairs of channels, half the registers of AVX2.
constexpr int kAtOnce = 4;

struct Sizes {
  int64_t batch, steps, channels, taps;

  int64_t blocks() const { return (steps + kSteps - 1) / kSteps; }
  int64_t columns() const { return (channels + kChannels - 1) / kChannels; }
  int64_t tasks() const { return batch * blocks() * columns(); }
};

inline Sizes sizes_of(const char* op, const Tensor& x, const Tensor& weight,
                      const std::optional<Tensor>& bias, const std::optional<Tensor>& state) {
  expect_float(op, x);
  STD_TORCH_CHECK(x.dim() == 3 && weight.dim() == 2, op, ": x must be [B, T, D], weight [D, K]");
  const Sizes s{x.size(0), x.size(1), x.size(2), weight.size(1)};
  STD_TORCH_CHECK(weight.size(0) == s.channels && s.taps >= 2 && s.taps <= kMostTaps, op,
                  ": weight must be [D, K] with K from 2 to 8");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->numel() == s.channels), op,
                  ": bias must be [D]");
  STD_TORCH_CHECK(
      !state || (state->dim() == 3 && state->size(0) == s.batch && state->size(1) == s.taps - 1 &&
                 state->size(2) == s.channels && state->scalar_type() == x.scalar_type()),
      op, ": state must be [B, K - 1, D], in the dtype of x");
  return s;
}

// Weights [K][D] and the bias [D], in the order of Pairs of T, whole Pairs of them.
template <typename T>
class Taps {
 public:
  Taps(const char* op, const Tensor& weight, const std::optional<Tensor>& bias, const Sizes& s)
      : width(lanes_for(s.channels)), values_((s.taps + 1) * width) {
    read(op, weight, [&](int64_t i, Acc<T> v) { at(i % s.taps, i / s.taps) = v; });
    if (bias) read(op, *bias, [&](int64_t i, Acc<T> v) { at(s.taps, i) = v; });
  }

  static int64_t lanes_for(int64_t n) {
    return (n + simd::kStep<T> - 1) / simd::kStep<T> * simd::kStep<T>;
  }

  const Acc<T>* row(int64_t j) const { return values_.data() + j * width; }

  const int64_t width;

 private:
  Acc<T>& at(int64_t j, int64_t channel) {
    constexpr int64_t step = simd::kStep<T>;
    return values_[j * width + channel / step * step + simd::slot<T>(channel % step)];
  }

  template <typename Put>
  void read(const char* op, const Tensor& from_in, Put put) {
    const Tensor from = dense(from_in);
    dispatch_float(from.scalar_type(), op, [&](auto type) {
      using W = decltype(type);
      const W* values = data<W>(from);
      for (int64_t i = 0; i < from.numel(); ++i) {
        const Acc<T> v = static_cast<Acc<T>>(values[i]);
        // a plain NaN: simd::store to bfloat16 wants no payload
        put(i, v == v ? v : Acc<T>(NAN));
      }
    });
  }

  std::vector<Acc<T>> values_;
};

// The steps of one batch entry, those before the first one included.
template <typename T>
struct Steps {
  const T *x, *state, *zeros;
  int64_t channels, before;

  const T* at(int64_t t) const {
    if (t >= 0) return x + t * channels;
    return state ? state + (before + t) * channels : zeros;
  }
};

template <typename T>
std::vector<T> no_steps(int64_t channels) {
  return std::vector<T>(channels, T(0.0f));
}

// Calls put(i, elements, r, u) for the sums u of steps t + r, r < Rows, channels from .. to.
template <int Taps_, int Rows, typename T, typename Put>
inline void sums_at(const Steps<T>& steps, const Taps<T>& taps, int64_t t, int64_t from, int64_t to,
                    Put put) {
  const T* rows[Taps_ + Rows - 1];
  for (int r = 0; r < Taps_ + Rows - 1; ++r) rows[r] = steps.at(t - (Taps_ - 1) + r) + from;
  const Acc<T>* const w = taps.row(0) + from;
  const Acc<T>* const bias = taps.row(Taps_) + from;
  const int64_t width = taps.width;
  simd::for_each_pair<T>(to - from, [&](int64_t i, auto elements) {
    simd::Pair<Acc<T>> sum[Rows];
    const auto b = simd::load(bias + i);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) sum[r] = b;
#pragma GCC unroll 16
    for (int k = 0; k < Taps_ + Rows - 1; ++k) {
      const auto x = simd::load(rows[k] + i, elements);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const int j = k - r;
        if (j >= 0 && j < Taps_) sum[r] += x * simd::load(w + j * width + i);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) put(i, elements, r, sum[r]);
  });
}

// Calls put(t, i, elements, u) for steps first .. last.
template <int Taps_, typename T, typename Put>
void sums_of(const Steps<T>& steps, const Taps<T>& taps, int64_t first, int64_t last, int64_t from,
             int64_t to, Put put) {
  int64_t t = first;
  const auto run = [&]<int Rows>(std::integral_constant<int, Rows>) {
    for (; t + Rows <= last; t += Rows) {
      sums_at<Taps_, Rows>(steps, taps, t, from, to, [&](int64_t i, auto elements, int r, auto u) {
        put(t + r, from + i, elements, u);
      });
    }
  };
  run(std::integral_constant<int, kAtOnce>());
  run(std::integral_constant<int, 1>());
}

// Calls body with the number of taps as a constant.
template <typename Body>
void dispatch_taps(int64_t taps, Body body) {
  [&]<int... I>(std::integer_sequence<int, I...>) {
    (void)((taps == I && (body(std::integral_constant<int, I>()), true)) || ...);
  }(std::integer_sequence<int, 2, 3, 4, 5, 6, 7, 8>());
}

// A task's part: steps first .. last of entry b, channels from .. to.
struct Part {
  int64_t b, block, first, last, from, to;

  Part(const Sizes& s, int64_t task) {
    const int64_t column = task % s.columns();
    block = task / s.columns() % s.blocks();
    b = task / s.columns() / s.blocks();
    first = block * kSteps;
    last = std::min(s.steps, first + kSteps);
    from = column * kChannels;
    to = std::min(s.channels, from + kChannels);
  }
};

template <typename T>
Steps<T> steps_of(const T* x, const T* state, const T* zeros, const Sizes& s, int64_t b) {
  return {x + b * s.steps * s.channels, state ? state + b * (s.taps - 1) * s.channels : nullptr,
          zeros, s.channels, s.taps - 1};
}

inline int64_t grain_tasks(const Sizes& s) {
  return grain_rows(std::min(s.steps, kSteps) * std::min(s.channels, kChannels));
}

inline Tensor empty_state(const Sizes& s, ScalarType dtype) {
  const int64_t sizes[] = {s.batch, s.taps - 1, s.channels};
  return empty(sizes, 3, dtype);
}

}  // namespace metalcore::cpu::conv
