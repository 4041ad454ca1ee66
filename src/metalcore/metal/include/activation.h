// SPDX-License-Identifier: MIT
// Activations and their slopes, for one value and for four.
#pragma once

#include "chunk.h"

struct value_and_slope {
  float value;
  float slope;
};

// 1 / d for a finite d that is not small: what the hardware gives, and one step of Newton's. A
// precise division takes six times the instructions.
inline float reciprocal(float d) {
  const float r = fast::divide(1.0f, d);
  return fma(fma(-d, r, 1.0f), r, r);
}

// x / (1 + exp(-x)). Nothing happens below the limit, and exp is finite above it.
struct silu_of {
  static float value(float x) {
    return x * (x < -80.0f ? 0.0f : reciprocal(1.0f + precise::exp(-x)));
  }

  static value_and_slope both(float x) {
    x = x < -80.0f ? -80.0f : x;
    const float e = precise::exp(-x);
    const float s = reciprocal(1.0f + e);
    return {x * s, s + x * s * (e * s)};  // 1 - s = e s keeps its digits
  }
};

// x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)),  2 u = sqrt(8 / pi) * (x + 0.044715 x^3)
struct gelu_tanh {
  static float value(float x) {
    const float e = precise::exp(-x * (x * x * 0.0713548163f + 1.59576912f));
    return x * (x < -10.0f ? 0.0f : reciprocal(1.0f + e));
  }

  static value_and_slope both(float x) {
    x = x < -10.0f ? -10.0f : x;
    const float square = x * x;
    const float e = precise::exp(-x * (square * 0.0713548163f + 1.59576912f));
    const float s = reciprocal(1.0f + e);
    return {x * s, s + x * s * (e * s) * (square * 0.214064449f + 1.59576912f)};
  }
};

// x * P(X <= x) for a standard normal X. P(X > a) is 2 to a polynomial in a >= 0: within 1.4e-8,
// and up to a = 9 within a thousandth of itself. Beyond, it falls faster.
struct gelu_erf {
  static float value(float x) { return x * below(x); }

  static value_and_slope both(float x) {
    const float p = below(x);
    const float density = precise::exp2(fma(x * x, -0.721347520f, -1.32574806f));
    return {x * p, fma(x, density, p)};
  }

  static float below(float x) {
    const float a = abs(x);
    float m = -1.23655086e-8f;
    m = fma(m, a, 4.58906413e-7f);
    m = fma(m, a, -7.01540012e-6f);
    m = fma(m, a, 5.58216962e-5f);
    m = fma(m, a, -2.17462832e-4f);
    m = fma(m, a, -1.10982844e-4f);
    m = fma(m, a, 0.00706201745f);
    m = fma(m, a, -0.0525063239f);
    m = fma(m, a, -0.459203452f);
    m = fma(m, a, -1.15110576f);
    const float tail = precise::exp2(fma(m, a, -1.0f));
    return x < 0.0f ? tail : 1.0f - tail;
  }
};

template <typename ACTIVATION>
inline float activate(float x) {
  return ACTIVATION::value(x);
}

template <typename ACTIVATION>
inline float4 activate(float4 x) {
  return float4(
      ACTIVATION::value(x.x), ACTIVATION::value(x.y), ACTIVATION::value(x.z),
      ACTIVATION::value(x.w));
}

template <typename ACTIVATION>
inline void activate(float x, thread float& value, thread float& slope) {
  const value_and_slope v = ACTIVATION::both(x);
  value = v.value;
  slope = v.slope;
}

template <typename ACTIVATION>
inline void activate(float4 x, thread float4& value, thread float4& slope) {
  const value_and_slope a = ACTIVATION::both(x.x);
  const value_and_slope b = ACTIVATION::both(x.y);
  const value_and_slope c = ACTIVATION::both(x.z);
  const value_and_slope d = ACTIVATION::both(x.w);
  value = float4(a.value, b.value, c.value, d.value);
  slope = float4(a.slope, b.slope, c.slope, d.slope);
}
