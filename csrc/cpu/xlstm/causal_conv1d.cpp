// SPDX-License-Identifier: MIT
// Causal convolution of each channel over time, on the CPU. x is [B, T, D].
//   u_t = sum_j w_j x_(t-K+1+j) + b,  y = u or silu(u)
//
// A task is a block of steps by a block of channels. Channels fill registers; a few steps are
// computed at once, so that a weight is loaded once for all of them. Blocks are fixed by the shape.

#include "causal_conv1d.h"

namespace metalcore::cpu {
namespace {

using namespace conv;

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

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("causal_conv1d", kernel<&causal_conv1d>);
}

}  // namespace metalcore::cpu
