// SPDX-License-Identifier: MIT
// Functions of numbers that are sums of two floats: y + y_low = f(x + x_low, ...).
//
// One thread per number. What is not finite, and zeros that have a sign, are as float32 has them.

#include "double_float.h"

struct addition {
  static two_floats of(two_floats x, two_floats y) {
    const float plain = x.high + y.high;
    return isfinite(plain) ? pair_sum(x, y) : two_floats{plain, 0.0f};
  }
};

struct subtraction {
  static two_floats of(two_floats x, two_floats y) { return addition::of(x, negative(y)); }
};

struct multiplication {
  static two_floats of(two_floats x, two_floats y) {
    const float plain = x.high * y.high;
    return is_plain(plain) ? pair_product(x, y) : two_floats{plain, 0.0f};
  }
};

struct division {
  static two_floats of(two_floats x, two_floats y) {
    const float plain = x.high / y.high;
    // of an infinite y, the rest is not a number
    return is_plain(plain) ? pair_quotient(x, y) : two_floats{plain, 0.0f};
  }
};

struct square_root {
  static two_floats of(two_floats x) {
    const float plain = precise::sqrt(x.high);
    return is_plain(plain) ? root(x) : two_floats{plain, 0.0f};
  }
};

struct exponential {
  static two_floats of(two_floats x) {
    const float plain = precise::exp(x.high);
    return is_plain(plain) ? pair_exp(x) : two_floats{plain, 0.0f};
  }
};

struct logarithm {
  static two_floats of(two_floats x) {
    const float plain = precise::log(x.high);
    return isfinite(plain) ? pair_log(x) : two_floats{plain, 0.0f};
  }
};

template <typename F>
[[max_total_threads_per_threadgroup(256)]] kernel void double_float_of_one(
    device const float* x [[buffer(0)]],
    device const float* x_low [[buffer(1)]],
    device float* y [[buffer(2)]],
    device float* y_low [[buffer(3)]],
    constant uint& n [[buffer(4)]],
    uint i [[thread_position_in_grid]]) {
  if (i < n) {
    const two_floats found = F::of({x[i], x_low[i]});
    y[i] = found.high;
    y_low[i] = found.low;
  }
}

template <typename F>
[[max_total_threads_per_threadgroup(256)]] kernel void double_float_of_two(
    device const float* x [[buffer(0)]],
    device const float* x_low [[buffer(1)]],
    device const float* z [[buffer(2)]],
    device const float* z_low [[buffer(3)]],
    device float* y [[buffer(4)]],
    device float* y_low [[buffer(5)]],
    constant uint& n [[buffer(6)]],
    uint i [[thread_position_in_grid]]) {
  if (i < n) {
    const two_floats found = F::of({x[i], x_low[i]}, {z[i], z_low[i]});
    y[i] = found.high;
    y_low[i] = found.low;
  }
}

// y = a b + c, rounded once.
[[max_total_threads_per_threadgroup(256)]] kernel void double_float_fma(
    device const float* a [[buffer(0)]],
    device const float* a_low [[buffer(1)]],
    device const float* b [[buffer(2)]],
    device const float* b_low [[buffer(3)]],
    device const float* c [[buffer(4)]],
    device const float* c_low [[buffer(5)]],
    device float* y [[buffer(6)]],
    device float* y_low [[buffer(7)]],
    constant uint& n [[buffer(8)]],
    uint i [[thread_position_in_grid]]) {
  if (i < n) {
    const three_floats sum =
        with_products({c[i], c_low[i], 0.0f}, {a[i], a_low[i]}, {b[i], b_low[i]});
    const two_floats found = rounded(sum);
    y[i] = found.high;
    y_low[i] = found.low;
  }
}
