// SPDX-License-Identifier: MIT
// Causal convolution of each channel over time, on the CPU. x is [B, T, D].
//   u_t = sum_j w_j x_(t-K+1+j) + b,  y = u or silu(u)
//   g_t = dy_t slope(u_t),  dx_t = sum_j w_j g_(t+K-1-j),  dw_j = sum_t g_t x_(t-K+1+j),  db = sum
//   g
//
// A task is a block of steps by a block of channels. Channels fill registers; a few steps are
// computed at once, so that a weight is loaded once for all of them. Blocks are fixed by the shape,
// and each sums its own part of the gradients of the weights.

#include <memory>
#include <tuple>
#include <vector>

#include "../common/lanes.h"
#include "../train/activation.h"

namespace metalcore::cpu {
namespace {

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

Sizes sizes_of(const char* op, const Tensor& x, const Tensor& weight,
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
    ((taps == I && (body(std::integral_constant<int, I>()), true)) || ...);
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

int64_t grain_tasks(const Sizes& s) {
  return grain_rows(std::min(s.steps, kSteps) * std::min(s.channels, kChannels));
}

Tensor empty_state(const Sizes& s, ScalarType dtype) {
  const int64_t sizes[] = {s.batch, s.taps - 1, s.channels};
  return empty(sizes, 3, dtype);
}

std::tuple<Tensor, Tensor> causal_conv1d(const Tensor& x_in, const Tensor& weight,
                                         std::optional<Tensor> bias, std::optional<Tensor> state_in,
                                         bool silu) {
  const char* op = "causal_conv1d";
  const Sizes s = sizes_of(op, x_in, weight, bias, state_in);
  const Tensor x = dense(x_in), state = state_in ? dense(*state_in) : x;
  Tensor y = cpu::empty_like(x), last = empty_state(s, x.scalar_type());
  metalcore_variant = "steps";
  dispatch_float(x.scalar_type(), op, [&](auto type) {
    using T = decltype(type);
    const Taps<T> taps(op, weight, bias, s);
    const auto zeros = no_steps<T>(s.channels);
    const T *xp = data<T>(x), *before = state_in ? data<T>(state) : nullptr;
    T *yp = mutable_data<T>(y), *lp = mutable_data<T>(last);
    dispatch_taps(s.taps, [&](auto count) {
      parallel_for(0, s.tasks(), grain_tasks(s), [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) {
          const Part p(s, task);
          const Steps<T> steps = steps_of(xp, before, zeros.data(), s, p.b);
          T* const out = yp + p.b * s.steps * s.channels;
          sums_of<count.value>(steps, taps, p.first, p.last, p.from, p.to,
                               [&](int64_t t, int64_t i, auto elements, auto u) {
                                 if (silu) {
                                   u = {Silu::value<T>(u.first), Silu::value<T>(u.second)};
                                 }
                                 simd::store(out + t * s.channels + i, u, elements);
                               });
        }
      });
    });
    for (int64_t b = 0; b < s.batch; ++b) {
      const Steps<T> steps = steps_of(xp, before, zeros.data(), s, b);
      for (int64_t r = 0; r < s.taps - 1; ++r, lp += s.channels) {
        std::copy_n(steps.at(s.steps - (s.taps - 1) + r), s.channels, lp);
      }
    }
  });
  return {y, last};
}

// What the gradients of all tasks are computed from and written to.
template <typename T>
struct Backward {
  using A = Acc<T>;
  Sizes s;
  const Taps<T>& taps;
  const T *dy, *dlast, *x, *state, *zeros;
  bool silu;
  T *dx, *dstate;
  A* sums;  // [B * blocks][K + 1][width], of each block of steps

  // g of steps first .. last, zeros where there are none, as rows of kChannels.
  template <int Taps_>
  void slopes(const Steps<T>& steps, const Part& p, int64_t last, A* g) const {
    const T* const up = dy + p.b * s.steps * s.channels;
    const auto row = [&](int64_t t, int64_t i) {
      return g + (t - p.first) * kChannels + (i - p.from);
    };
    if (silu) {
      sums_of<Taps_>(steps, taps, p.first, last, p.from, p.to,
                     [&](int64_t t, int64_t i, auto elements, auto u) {
                       simd::Pair<A> value, slope;
                       Silu::value_and_slope<T>(u.first, value.first, slope.first);
                       Silu::value_and_slope<T>(u.second, value.second, slope.second);
                       const auto d = simd::load(up + t * s.channels + i, elements);
                       simd::store(row(t, i), d * slope);
                     });
      return;
    }
    for (int64_t t = p.first; t < last; ++t) {
      simd::for_each_pair<T>(p.to - p.from, [&](int64_t i, auto elements) {
        simd::store(row(t, p.from + i), simd::load(up + t * s.channels + p.from + i, elements));
      });
    }
  }

  // dx of step t, which may be one of the state, from g of the steps from it on.
  template <int Taps_>
  void step(const Part& p, int64_t t, const A* g, int64_t known, T* to) const {
    const int64_t before = s.taps - 1, from_end = t - (s.steps - before);
    const T* const add =
        dlast && from_end >= 0 ? dlast + (p.b * before + from_end) * s.channels : nullptr;
    simd::for_each_pair<T>(p.to - p.from, [&](int64_t i, auto elements) {
      simd::Pair<A> sum = {};
      for (int j = 0; j < Taps_; ++j) {
        const int64_t later = t + Taps_ - 1 - j;
        if (later < p.first || later >= known) continue;
        sum += simd::load(g + (later - p.first) * kChannels + i) *
               simd::load(taps.row(j) + p.from + i);
      }
      if (add) sum += simd::load(add + p.from + i, elements);
      simd::store(to + p.from + i, sum, elements);
    });
  }

  // The task's part of the gradients of weights and bias.
  template <int Taps_>
  void weights(const Steps<T>& steps, const Part& p, const A* g) const {
    A* const out = sums + (p.b * s.blocks() + p.block) * (Taps_ + 1) * taps.width + p.from;
    simd::for_each_pair<T>(p.to - p.from, [&](int64_t i, auto elements) {
      simd::Pair<A> sum[Taps_ + 1] = {};
      for (int64_t t = p.first; t < p.last; ++t) {
        const auto d = simd::load(g + (t - p.first) * kChannels + i);
#pragma GCC unroll 8
        for (int j = 0; j < Taps_; ++j) {
          sum[j] += d * simd::load(steps.at(t - (Taps_ - 1) + j) + p.from + i, elements);
        }
        sum[Taps_] += d;
      }
      for (int j = 0; j <= Taps_; ++j) simd::store(out + j * taps.width + i, sum[j]);
    });
  }

  template <int Taps_>
  void run(int64_t task) const {
    const Part p(s, task);
    const Steps<T> steps = steps_of(x, state, zeros, s, p.b);
    const int64_t known = std::min(s.steps, p.last + Taps_ - 1);
    A* const g = lanes::workspace<A>((kSteps + kMostTaps) * kChannels);
    slopes<Taps_>(steps, p, known, g);
    for (int64_t t = p.first; t < p.last; ++t) {
      step<Taps_>(p, t, g, known, dx + (p.b * s.steps + t) * s.channels);
    }
    if (dstate && p.first == 0) {
      for (int64_t r = 0; r < Taps_ - 1; ++r) {
        const int64_t t = r - (Taps_ - 1);
        step<Taps_>(p, t, g, known, dstate + (p.b * (Taps_ - 1) + r) * s.channels);
      }
    }
    weights<Taps_>(steps, p, g);
  }
};

// Sums over all blocks, in order: of weights [K] rows, then the bias.
template <typename T>
void add_blocks(const Backward<T>& run, Tensor& dweight, Tensor* dbias) {
  using A = Acc<T>;
  const Sizes& s = run.s;
  const int64_t width = run.taps.width, rows = s.taps + 1, blocks = s.batch * s.blocks();
  std::vector<A> total(rows * width);
  parallel_for(0, rows * width, kGrainElements / std::max<int64_t>(1, blocks) + 1,
               [&](int64_t begin, int64_t end) {
                 for (int64_t b = 0; b < blocks; ++b) {
                   const A* part = run.sums + b * rows * width;
                   for (int64_t i = begin; i < end; ++i) total[i] += part[i];
                 }
               });
  const auto at = [&](int64_t j, int64_t channel) {
    constexpr int64_t step = simd::kStep<T>;
    return total[j * width + channel / step * step + simd::slot<T>(channel % step)];
  };
  dispatch_float(dweight.scalar_type(), "causal_conv1d_backward", [&](auto type) {
    using W = decltype(type);
    W* const to = mutable_data<W>(dweight);
    for (int64_t i = 0; i < s.channels * s.taps; ++i) {
      to[i] = static_cast<W>(at(i % s.taps, i / s.taps));
    }
  });
  if (!dbias) return;
  dispatch_float(dbias->scalar_type(), "causal_conv1d_backward", [&](auto type) {
    using W = decltype(type);
    W* const to = mutable_data<W>(*dbias);
    for (int64_t i = 0; i < s.channels; ++i) to[i] = static_cast<W>(at(s.taps, i));
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_backward(
    const Tensor& dy_in, std::optional<Tensor> dlast_in, const Tensor& x_in, const Tensor& weight,
    std::optional<Tensor> bias, std::optional<Tensor> state_in, bool silu) {
  const char* op = "causal_conv1d_backward";
  const Sizes s = sizes_of(op, x_in, weight, bias, state_in);
  const Tensor x = dense(x_in), dy = dense(dy_in), state = state_in ? dense(*state_in) : x;
  expect_like(op, "dy", dy, x);
  const ScalarType dtype = x.scalar_type();
  Tensor dx = cpu::empty_like(x), dlast = dlast_in ? dense(*dlast_in) : x;
  constexpr int64_t kNothing = 0;
  Tensor dweight = cpu::empty_like(weight), nothing = empty(&kNothing, 1, dy.scalar_type());
  Tensor dbias = bias ? cpu::empty_like(*bias) : nothing;
  Tensor dstate = state_in ? empty_state(s, dtype) : nothing;
  if (dlast_in) expect_like(op, "dlast", dlast, empty_state(s, dtype));
  metalcore_variant = "steps";
  dispatch_float(dtype, op, [&](auto type) {
    using T = decltype(type);
    using A = Acc<T>;
    const Taps<T> taps(op, weight, bias, s);
    const auto zeros = no_steps<T>(s.channels);
    const auto sums =
        std::make_unique_for_overwrite<A[]>(s.batch * s.blocks() * (s.taps + 1) * taps.width);
    const Backward<T> run{s,
                          taps,
                          data<T>(dy),
                          dlast_in ? data<T>(dlast) : nullptr,
                          data<T>(x),
                          state_in ? data<T>(state) : nullptr,
                          zeros.data(),
                          silu,
                          mutable_data<T>(dx),
                          state_in ? mutable_data<T>(dstate) : nullptr,
                          sums.get()};
    dispatch_taps(s.taps, [&](auto count) {
      parallel_for(0, s.tasks(), grain_tasks(s), [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) run.template run<count.value>(task);
      });
    });
    if (s.steps == 0 && state_in) {
      T* const to = mutable_data<T>(dstate);
      dlast_in ? std::copy_n(run.dlast, dstate.numel(), to)
               : std::fill_n(to, dstate.numel(), T(0.0f));
    }
    add_blocks(run, dweight, bias ? &dbias : nullptr);
  });
  return {dx, dweight, dbias, dstate};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("causal_conv1d", kernel<&causal_conv1d>);
  m.impl("causal_conv1d_backward", kernel<&causal_conv1d_backward>);
}

}  // namespace metalcore::cpu
