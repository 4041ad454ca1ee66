// SPDX-License-Identifier: MIT
// The gradient of the causal convolution, on the CPU:
//   g_t = dy_t slope(u_t),  dx_t = sum_j w_j g_(t+K-1-j),  dw_j = sum_t g_t x_(t-K+1+j),
//   db = sum g
//
// Tasks are those of the forward pass, and each sums its own part of the gradients of the weights.

#include <memory>

#include "causal_conv1d.h"

namespace metalcore::cpu {
namespace {

using namespace conv;

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
  m.impl("causal_conv1d_backward", kernel<&causal_conv1d_backward>);
}

}  // namespace metalcore::cpu
