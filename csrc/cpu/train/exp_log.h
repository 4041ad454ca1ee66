// SPDX-License-Identifier: MIT
// exp, log and tanh of registers, within 3 units in the last place where the result is normal.
//
//   exp(x) = 2^n * (1 + r + r^2 q(r)),  n = round(x / ln 2),  |r| <= ln 2 / 2
//   log(x) = e ln 2 + 2 s (1 + s^2 p(s^2)),  x = 2^e m,  s = (m - 1) / (m + 1),  m about 1
//   tanh(x) = t / (t + 2),  t = exp(2 x) - 1, whose 1 is taken away before it is rounded
//
// q and p are Taylor series in double, and least-maximum fits in float.
#pragma once

#include <cmath>

#include "../common/simd.h"

namespace metalcore::simd {

template <typename A>
struct Exact;

template <>
struct Exact<float> {
  typedef int32_t Integer;
  static constexpr int kFraction = 23, kBias = 127;
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float kLn2High = 0.693145752f, kLn2Low = 1.42860677e-06f;
  // exp is normal from kSmallest to kHighest; at kLowest its scale is 0
  static constexpr float kLowest = -88.0f, kSmallest = -87.3365402f, kHighest = 88.7228241f;
  static constexpr float kExp[] = {0.49999994f, 0.16666515f, 0.041668456f, 0.0083694188f,
                                   0.0013813142f};
  static constexpr float kLog[] = {0.33333388f, 0.19988725f, 0.14937212f};
};

template <>
struct Exact<double> {
  typedef int64_t Integer;
  static constexpr int kFraction = 52, kBias = 1023;
  static constexpr double kRound = 6755399441055744.0;
  static constexpr double kLn2High = 0.693147180369123816490, kLn2Low = 1.90821492927058770002e-10;
  static constexpr double kLowest = -709.0, kSmallest = -708.396418532264106,
                          kHighest = 709.78271289338386;
  static constexpr double kExp[] = {1.0 / 2,        1.0 / 6,         1.0 / 24,
                                    1.0 / 120,      1.0 / 720,       1.0 / 5040,
                                    1.0 / 40320,    1.0 / 362880,    1.0 / 3628800,
                                    1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800.0};
  static constexpr double kLog[] = {1.0 / 3,  1.0 / 5,  1.0 / 7,  1.0 / 9,  1.0 / 11,
                                    1.0 / 13, 1.0 / 15, 1.0 / 17, 1.0 / 19, 1.0 / 21};
};

typedef int32_t Int32Vec __attribute__((vector_size(MC_REGISTER_BYTES)));
typedef int64_t Int64Vec __attribute__((vector_size(MC_REGISTER_BYTES)));

template <typename A>
using IntVec = std::conditional_t<std::is_same_v<A, double>, Int64Vec, Int32Vec>;

template <typename A>
inline Vec<A> splat(A value) {
  return Vec<A>{} + value;
}

// The larger of two; b where one is NaN.
template <typename V>
inline V larger(V a, V b) {
  return a > b ? a : b;
}

template <typename V, typename A, int N>
inline V polynomial(V x, const A (&coefficients)[N]) {
  V sum = V{} + coefficients[N - 1];
  for (int i = N - 2; i >= 0; --i) sum = sum * x + coefficients[i];
  return sum;
}

// exp(x) = scale * (1 + rest), for x from kLowest to kHighest.
template <typename A>
struct ExpParts {
  Vec<A> scale, rest;

  explicit ExpParts(Vec<A> x) {
    using E = Exact<A>;
    const Vec<A> shifted = x * A(1.44269504088896340736) + E::kRound;
    const Vec<A> n = shifted - E::kRound;
    const Vec<A> r = (x - n * E::kLn2High) - n * E::kLn2Low;
    scale = bits_as<Vec<A>>((bits_as<IntVec<A>>(shifted) + E::kBias) << E::kFraction);
    rest = r + r * r * polynomial(r, E::kExp);
  }
};

// exp of x <= 0 (or NaN): the usual case of a softmax, without the care for large results.
template <typename A>
inline Vec<A> exp_nonpositive(Vec<A> x) {
  const ExpParts<A> e(larger(splat(Exact<A>::kLowest), x));
  return e.scale + e.scale * e.rest;
}

template <typename A>
inline Vec<A> exp(Vec<A> x) {
  using E = Exact<A>;
  const ExpParts<A> e(x);
  // 2^128 is no float, but its exponent can be added
  const IntVec<A> power =
      bits_as<IntVec<A>>(e.scale) - (typename E::Integer(E::kBias) << E::kFraction);
  const Vec<A> y = bits_as<Vec<A>>(bits_as<IntVec<A>>(A(1) + e.rest) + power);
  const Vec<A> limited = x > E::kHighest ? splat(A(INFINITY)) : (x < E::kSmallest ? Vec<A>{} : y);
  return x == x ? limited : x;
}

template <typename A>
inline Vec<A> log(Vec<A> x) {
  using E = Exact<A>;
  constexpr A kSmallest =
      std::is_same_v<A, double> ? A(2.2250738585072014e-308) : A(1.17549435e-38f);
  const auto tiny = x < splat(kSmallest);
  const Vec<A> scaled = tiny ? x * A(int64_t(1) << E::kFraction) : x;
  // m from about 0.7 to 1.4: the exponent counts from the bits of sqrt(1/2)
  const A root = A(0.707106781186547524401);
  const IntVec<A> offset = bits_as<IntVec<A>>(scaled) - bits_as<IntVec<A>>(splat(root));
  const IntVec<A> exponent = offset >> E::kFraction;
  const Vec<A> m = bits_as<Vec<A>>(bits_as<IntVec<A>>(scaled) - (exponent << E::kFraction));
  Vec<A> e = __builtin_convertvector(exponent, Vec<A>);
  e = tiny ? e - A(E::kFraction) : e;
  const Vec<A> s = (m - A(1)) / (m + A(1)), z = s * s;
  const Vec<A> y =
      e * E::kLn2High + (e * E::kLn2Low + (A(2) * s + A(2) * s * z * polynomial(z, E::kLog)));
  const Vec<A> special = x == A(0) ? splat(A(-INFINITY)) : (x < A(0) ? splat(A(NAN)) : x);
  return (x > A(0)) & (x < splat(A(INFINITY))) ? y : special;
}

template <typename A>
inline Vec<A> tanh(Vec<A> x) {
  // from 20 on tanh is 1 to within half a unit in the last place, in double too
  const Vec<A> magnitude = x < A(0) ? -x : x;
  const Vec<A> twice = magnitude > A(20) ? splat(A(40)) : magnitude * A(2);
  const ExpParts<A> e(twice);
  const Vec<A> t = e.scale * e.rest + (e.scale - A(1));
  const Vec<A> y = t / (t + A(2));
  return x < A(0) ? -y : y;
}

#define MC_EACH_REGISTER(function)                        \
  template <typename A>                                   \
  inline Pair<A> function(Pair<A> v) {                    \
    return {function<A>(v.first), function<A>(v.second)}; \
  }
MC_EACH_REGISTER(exp_nonpositive)
MC_EACH_REGISTER(exp)
MC_EACH_REGISTER(log)
MC_EACH_REGISTER(tanh)
#undef MC_EACH_REGISTER

}  // namespace metalcore::simd
