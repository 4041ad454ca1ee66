// SPDX-License-Identifier: MIT
// Activations and their slopes on registers, as exact as results of type T show, and the gated
// units made of them.
#pragma once

#include <tuple>

#include "../common/elementwise.h"

namespace metalcore::cpu {

// x / (1 + exp(-x))
struct Silu {
  template <typename T, typename V>
  static V value(V x) {
    return x / (1 + simd::exp_minus_as<T>(x));
  }

  template <typename T, typename V>
  static void value_and_slope(V x, V& value, V& slope) {
    // 1 - s = e s keeps its digits; e is finite, because nothing happens below the limit
    x = simd::larger(simd::splat<V>(-80), x);
    const V e = simd::exp_minus_as<T, true>(x), s = 1 / (1 + e);
    value = x * s;
    slope = s + value * (e * s);
  }
};

// x * P(X <= x) for a standard normal X
struct Gelu {
  template <typename T, typename V>
  static V value(V x) {
    return x * simd::Normal<V>(x).below;
  }

  template <typename T, typename V>
  static void value_and_slope(V x, V& value, V& slope) {
    const simd::Normal<V> normal(x);
    value = x * normal.below;
    slope = normal.below + x * normal.density;
  }
};

// x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)),  2 u = sqrt(8 / pi) * (x + 0.044715 x^3)
struct GeluTanh {
  static constexpr double kLinear = 1.59576912160573071176, kCubic = kLinear * 0.044715;

  template <typename T, typename V>
  static V value(V x) {
    using A = simd::Lane<V>;
    return x / (1 + simd::exp_minus_as<T>(x * (x * x * A(kCubic) + A(kLinear))));
  }

  template <typename T, typename V>
  static void value_and_slope(V x, V& value, V& slope) {
    using A = simd::Lane<V>;
    x = simd::larger(simd::splat<V>(-10), x);
    const V square = x * x;
    const V e = simd::exp_minus_as<T, true>(x * (square * A(kCubic) + A(kLinear))), s = 1 / (1 + e);
    value = x * s;
    slope = s + value * (e * s) * (square * A(3 * kCubic) + A(kLinear));
  }
};

// act(x), or act(x + bias) with one bias [n] for all rows [..., n]
template <typename Activation>
Tensor activate(const char* op, const Tensor& x_in, const std::optional<Tensor>& bias_in,
                Activation act) {
  const Tensor x = dense(x_in);
  Tensor y = cpu::empty_like(x);
  dispatch_float(x.scalar_type(), op, [&](auto type) {
    using T = decltype(type);
    if (bias_in) {
      const Row<T> bias(op, *bias_in, x);
      map_elements<T>(
          {bias.others(x), bias.row()}, {mutable_data<T>(y)}, y.numel(), bias.n(),
          [=]<typename V>(V v, V b) { return std::array<V, 1>{act.template value<T>(v + b)}; });
    } else {
      map_elements<T>({whole<T>(x)}, {mutable_data<T>(y)}, y.numel(), kRun,
                      [=]<typename V>(V v) { return std::array<V, 1>{act.template value<T>(v)}; });
    }
  });
  return y;
}

// dx = dy * act'(x), or dy * act'(x + bias)
template <typename Activation>
Tensor activate_backward(const char* op, const Tensor& dy_in, const Tensor& x_in,
                         const std::optional<Tensor>& bias_in, Activation act) {
  const Tensor dy = dense(dy_in), x = dense(x_in);
  expect_like(op, "dy", dy, x);
  Tensor dx = cpu::empty_like(x);
  dispatch_float(x.scalar_type(), op, [&](auto type) {
    using T = decltype(type);
    const auto times_slope = [=]<typename V>(V d, V v) {
      V value, slope;
      act.template value_and_slope<T>(v, value, slope);
      return std::array<V, 1>{d * slope};
    };
    if (bias_in) {
      const Row<T> bias(op, *bias_in, x);
      map_elements<T>({bias.others(dy), bias.others(x), bias.row()}, {mutable_data<T>(dx)},
                      dx.numel(), bias.n(),
                      [=]<typename V>(V d, V v, V b) { return times_slope(d, v + b); });
    } else {
      map_elements<T>({whole<T>(dy), whole<T>(x)}, {mutable_data<T>(dx)}, dx.numel(), kRun,
                      times_slope);
    }
  });
  return dx;
}

// act(gate) * up
template <typename Activation>
Tensor gated(const char* op, const Tensor& gate, const Tensor& up, Activation) {
  expect_like(op, "up", up, gate);
  Tensor y = cpu::empty_like(gate);
  dispatch_float(gate.scalar_type(), op, [&](auto type) {
    using T = decltype(type);
    const Alike<T, 2> inputs({gate, up});
    map_elements<T>(inputs.in(), {mutable_data<T>(y)}, y.numel(), inputs.n(),
                    []<typename V>(V g, V u) {
                      return std::array<V, 1>{Activation::template value<T>(g) * u};
                    });
  });
  return y;
}

// dgate = dy * up * act'(gate), dup = dy * act(gate)
template <typename Activation>
std::tuple<Tensor, Tensor> gated_backward(const char* op, const Tensor& dy, const Tensor& gate,
                                          const Tensor& up, Activation) {
  expect_like(op, "dy", dy, gate);
  expect_like(op, "up", up, gate);
  Tensor dgate = cpu::empty_like(gate), dup = cpu::empty_like(gate);
  dispatch_float(gate.scalar_type(), op, [&](auto type) {
    using T = decltype(type);
    const Alike<T, 3> inputs({dy, gate, up});
    map_elements<T>(inputs.in(), {mutable_data<T>(dgate), mutable_data<T>(dup)}, dgate.numel(),
                    inputs.n(), []<typename V>(V d, V g, V u) {
                      V value, slope;
                      Activation::template value_and_slope<T>(g, value, slope);
                      return std::array<V, 2>{d * u * slope, d * value};
                    });
  });
  return {dgate, dup};
}

}  // namespace metalcore::cpu
