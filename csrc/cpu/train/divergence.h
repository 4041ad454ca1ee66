// SPDX-License-Identifier: MIT
// What kl_div and jsd share: a function of two registers, written out or summed, and its slopes.
//
// A divergence D has `value(x, t)`, which is 0 where both are, and `slopes(x, t)`: the derivatives
// by x and t. Sums are taken per run of kRun elements, then over the runs in order.
#pragma once

#include <array>
#include <tuple>
#include <vector>

#include "../common/elementwise.h"

namespace metalcore::cpu {

// p * v, and 0 where p is 0 and v may be infinite.
template <typename V>
V times(V p, V v) {
  return p == 0 ? V{} : p * v;
}

template <typename T, typename D>
simd::Acc<T> divergence_sum(const Tensor& input, const Tensor& target, const D& f) {
  using A = simd::Acc<T>;
  const int64_t total = input.numel(), runs = (total + kRun - 1) / kRun;
  std::vector<A> sums(runs);
  const T *x = data<T>(input), *t = data<T>(target);
  parallel_for(0, runs, grain_rows(kRun), [&](int64_t begin, int64_t end) {
    for (int64_t run = begin; run < end; ++run) {
      const int64_t at = run * kRun;
      sums[run] = simd::sum_over<T>(std::min(kRun, total - at), [&](int64_t i, auto elements) {
        const auto a = simd::load(x + at + i, elements), b = simd::load(t + at + i, elements);
        return simd::Pair<A>{f.value(a.first, b.first), f.value(a.second, b.second)};
      });
    }
  });
  metalcore_variant = "runs";
  double sum = 0;
  for (A one : sums) sum += one;
  return A(sum);
}

// `make(A())` gives the divergence for accumulation type A.
template <typename Make>
Tensor divergence(const char* op, const Tensor& input_in, const Tensor& target_in, bool reduce,
                  double scale, const Make& make) {
  expect_like(op, "target", target_in, input_in);
  const Tensor input = dense(input_in), target = dense(target_in);
  Tensor loss =
      reduce ? empty(nullptr, 0, accumulate_dtype(input.scalar_type())) : cpu::empty_like(input);
  dispatch_float(input.scalar_type(), op, [&](auto type) {
    using T = decltype(type);
    using A = simd::Acc<T>;
    const auto f = make(A());
    if (reduce) {
      mutable_data<A>(loss)[0] = divergence_sum<T>(input, target, f) * A(scale);
    } else {
      map_elements<T>(
          {whole<T>(input), whole<T>(target)}, {mutable_data<T>(loss)}, input.numel(), kRun,
          [&](auto x, auto t) { return std::array<decltype(x), 1>{f.value(x, t) * A(scale)}; });
    }
  });
  return loss;
}

// dloss is one number where the loss was reduced.
template <typename Make>
std::tuple<Tensor, Tensor> divergence_backward(const char* op, const Tensor& dloss_in,
                                               const Tensor& input_in, const Tensor& target_in,
                                               bool reduce, double scale, bool need_dtarget,
                                               const Make& make) {
  expect_like(op, "target", target_in, input_in);
  const Tensor input = dense(input_in), target = dense(target_in), dloss = dense(dloss_in);
  expect_float(op, input);
  if (reduce) {
    STD_TORCH_CHECK(
        dloss.numel() == 1 && dloss.scalar_type() == accumulate_dtype(input.scalar_type()), op,
        ": dloss must be one number, of the dtype of the loss");
  } else {
    expect_like(op, "dloss", dloss, input);
  }
  constexpr int64_t kNothing = 0;
  Tensor dinput = cpu::empty_like(input);
  Tensor dtarget = need_dtarget ? cpu::empty_like(input) : empty(&kNothing, 1, input.scalar_type());
  dispatch_float(input.scalar_type(), op, [&](auto type) {
    using T = decltype(type);
    using A = simd::Acc<T>;
    const auto f = make(A());
    const Input<T> x = whole<T>(input), t = whole<T>(target);
    T *dx = mutable_data<T>(dinput), *dt = mutable_data<T>(dtarget);
    const int64_t n = input.numel();
    const auto both = [&](auto d, auto a, auto b) {
      auto slopes = f.slopes(a, b);
      for (auto& s : slopes) s = s * (d * A(scale));
      return slopes;
    };
    const auto first = [&](auto d, auto a, auto b) {
      return std::array<decltype(a), 1>{f.slopes(a, b)[0] * (d * A(scale))};
    };
    if (!reduce) {
      const Input<T> d = whole<T>(dloss);
      if (need_dtarget) return map_elements<T>({d, x, t}, {dx, dt}, n, kRun, both);
      return map_elements<T>({d, x, t}, {dx}, n, kRun, first);
    }
    const A d = data<A>(dloss)[0];
    const auto with = [&](const auto& g) { return [&, d](auto a, auto b) { return g(d, a, b); }; };
    if (need_dtarget) return map_elements<T>({x, t}, {dx, dt}, n, kRun, with(both));
    return map_elements<T>({x, t}, {dx}, n, kRun, with(first));
  });
  return {dinput, dtarget};
}

}  // namespace metalcore::cpu
