// SPDX-License-Identifier: MIT
// exp, log, tanh and the normal distribution on registers of float or double, to a few ulp.
//
// exp: x = k * log(2) + r with |r| <= log(2) / 2, and 2 exp(r) = 2 + 2 r + r^2 q(r).
// log: x = 2^e * m with m around 1, s = (m - 1) / (m + 1), and log(m) = 2 s + 2 s^3 l(s^2). The
// normal distribution: P(X > a) = exp(-a^2 / 2) * p(a) / q(a) in float, a minimax fit for all a
// where it is not 0, and density(a) * t * m(1 - t) with t = 4 / (4 + a) in double.
// l fits in float and is a Taylor series in double; q and m interpolate at Chebyshev nodes,
// computed in 50 digits; their own error is below half an ulp. NaN gives NaN, and infinities their
// limits.
#pragma once

#include <limits>

#include "simd.h"

namespace metalcore::simd {

template <typename V>
using Lane = std::remove_cvref_t<decltype(V{}[0])>;

template <typename A>
struct Constants;

template <>
struct Constants<float> {
  typedef int32_t Int __attribute__((vector_size(MC_REGISTER_BYTES)));
  typedef uint32_t Unsigned __attribute__((vector_size(MC_REGISTER_BYTES)));
  static constexpr int kMantissaBits = 23, kBias = 127;
  // 1.5 * 2^23: adding it rounds to an integer, which then stands in the low bits.
  static constexpr float kRound = 12582912.0f;
  // log(2) in two parts, the first short enough for exact multiples.
  static constexpr float kLog2High = 0.693359375f, kLog2Low = -2.12194440e-4f;
  // Beyond these exp is 0 and infinite, tanh is 1.
  static constexpr float kExpZero = -87.5f, kExpInfinite = 89, kTanhOne = 10;
  static constexpr float kExp[] = {1.0f, 0.333331525f, 0.0833331049f, 0.0167264659f,
                                   0.00278525008f};
  static constexpr float kLog[] = {0.33333388f, 0.19988725f, 0.14937212f};
  // 2 * 2^f for |f| <= 1/2, fits to 9e-8 and 2.6e-6
  static constexpr float kTwice[] = {2.0f,        1.386294f,    0.48044485f,
                                     0.11101467f, 0.019343026f, 0.0026529455f};
  static constexpr float kTwiceCoarse[] = {1.99999852f, 1.38624363f, 0.480494896f, 0.111835721f,
                                           0.0191402029f};
  static constexpr float kTailP[] = {0.500000002f, 0.435523395f, 0.181186458f, 0.0399437065f,
                                     0.0040142008f};
  static constexpr float kTailQ[] = {1.0f,         1.66893171f,  1.19398366f,
                                     0.464062773f, 0.100131466f, 0.0100619645f};
};

template <>
struct Constants<double> {
  typedef int64_t Int __attribute__((vector_size(MC_REGISTER_BYTES)));
  typedef uint64_t Unsigned __attribute__((vector_size(MC_REGISTER_BYTES)));
  static constexpr int kMantissaBits = 52, kBias = 1023;
  static constexpr double kRound = 6755399441055744.0;
  static constexpr double kLog2High = 6.93147180369123816490e-01,
                          kLog2Low = 1.90821492927058770002e-10;
  static constexpr double kExpZero = -708.5, kExpInfinite = 710, kTanhOne = 20;
  static constexpr double kExp[] = {1.0000000000000002,     0.33333333333333337,
                                    0.083333333333247648,   0.016666666666660078,
                                    0.0027777777834734163,  0.00039682539726343114,
                                    4.9603042115736408e-05, 5.5114536553811392e-06,
                                    5.5240403182063094e-07, 5.0200945011389992e-08};
  static constexpr double kLog[] = {1.0 / 3,  1.0 / 5,  1.0 / 7,  1.0 / 9,  1.0 / 11,
                                    1.0 / 13, 1.0 / 15, 1.0 / 17, 1.0 / 19, 1.0 / 21};
  static constexpr double kMills[] = {
      1.2533141373155001,     -2.7466858626844375, 3.279827235828488,     -2.0004798996723543,
      0.18511176036413976,    0.4487077546965667,  -0.07540726023000571,  -0.13641656501659236,
      -0.0021161361653716662, 0.04962389392238989, -0.010323106760951984, 0.08755409596955767,
      -0.2958074706021276,    0.6718954909578263,  -1.2637137851115188,   1.895525739803736,
      -2.229456492047002,     2.036935843014699,   -1.4089825858035288,   0.7066036171533662,
      -0.24064294292223642,   0.04959461043428996, -0.00466207244443228};
};

template <typename V>
using IntOf = typename Constants<Lane<V>>::Int;

// Bits to compute with: sums of those of NaN and of infinities may wrap around.
template <typename V>
using UnsignedOf = typename Constants<Lane<V>>::Unsigned;

template <typename V>
inline V splat(Lane<V> value) {
  return V{} + value;
}

#if defined(__AVX512F__)
#define MC_X86(instruction) _mm512_##instruction
#elif defined(__AVX2__)
#define MC_X86(instruction) _mm256_##instruction
#endif

// a < b ? a : b, so b where one is NaN; in one instruction, which gcc does not find.
template <typename V>
inline V smaller(V a, V b) {
#if defined(MC_X86)
  if constexpr (std::is_same_v<V, FloatVec>) return (V)MC_X86(min_ps)(a, b);
  if constexpr (std::is_same_v<V, DoubleVec>) return (V)MC_X86(min_pd)(a, b);
#endif
  return a < b ? a : b;
}

template <typename V>
inline V larger(V a, V b) {
#if defined(MC_X86)
  if constexpr (std::is_same_v<V, FloatVec>) return (V)MC_X86(max_ps)(a, b);
  if constexpr (std::is_same_v<V, DoubleVec>) return (V)MC_X86(max_pd)(a, b);
#endif
  return a > b ? a : b;
}

// The sum of coefficients[i] * x^(i - First), from the last one down.
template <size_t First = 0, typename V, size_t N>
inline V polynomial(V x, const Lane<V> (&coefficients)[N]) {
  if constexpr (First == N - 1) {
    return splat<V>(coefficients[First]);
  } else {
    return polynomial<First + 1>(x, coefficients) * x + coefficients[First];
  }
}

template <typename V>
inline IntOf<V> sign_bit() {
  using Int = IntOf<V>;
  return Int{} + std::numeric_limits<Lane<Int>>::min();
}

template <typename V>
inline V magnitude(V x) {
  return bits_as<V>(bits_as<IntOf<V>>(x) & ~sign_bit<V>());
}

template <typename V>
inline V with_sign_of(V x, V from) {
  return bits_as<V>(bits_as<IntOf<V>>(x) | (bits_as<IntOf<V>>(from) & sign_bit<V>()));
}

// exp(x) = (2 + rest) * scale, where scale is half a power of two: the power itself may be infinite
// where exp is not. It is 0 for results below twice the smallest normal number.
template <typename V>
struct Exp {
  V rest, scale;

  explicit Exp(V x) {
    using C = Constants<Lane<V>>;
    const V shifted = x * Lane<V>(1.44269504088896340736) + C::kRound;
    const V whole = shifted - C::kRound;
    const V r = (x - whole * C::kLog2High) - whole * C::kLog2Low;
    rest = (polynomial(r, C::kExp) * r + 2) * r;
    const UnsignedOf<V> exponent = bits_as<UnsignedOf<V>>(shifted) + (C::kBias - 1);
    scale = bits_as<V>(exponent << C::kMantissaBits);  // the bits of kRound leave
  }
};

template <typename V>
inline V exp(V x) {
  using C = Constants<Lane<V>>;
  const Exp<V> e(smaller(splat<V>(C::kExpInfinite), larger(splat<V>(C::kExpZero), x)));
  return (2 + e.rest) * e.scale;
}

// Whether arithmetic to 16 bits is enough: a fortieth of what rounding to T changes, or less.
template <typename T>
constexpr bool kCoarse = std::is_same_v<T, BFloat16> || std::is_same_v<T, Half>;

// 2^(x * factor), 0 below the smallest normal number, given a fit of 2 * 2^f for |f| <= 1/2.
template <size_t N>
inline FloatVec power_of_two(FloatVec x, float factor, const float (&twice)[N]) {
  using C = Constants<float>;
  // with the bias, so that the low bits are the exponent of half the power
  constexpr float kRound = C::kRound + C::kBias - 1;
  const FloatVec shifted = x * factor + kRound;
  const FloatVec f = x * factor - (shifted - kRound);
  const auto half_power = bits_as<UnsignedOf<FloatVec>>(shifted) << C::kMantissaBits;
  return polynomial(f, twice) * bits_as<FloatVec>(half_power);
}

// exp(-x) for results that are stored as T. kFinite: x >= -88 is known.
template <typename T, bool kFinite = false, typename V>
inline V exp_minus_as(V x) {
  if constexpr (!kCoarse<T>) {
    return exp(-x);
  } else {
    using C = Constants<float>;
    const V finite = kFinite ? x : larger(splat<V>(-C::kExpInfinite), x);
    return power_of_two(smaller(splat<V>(-C::kExpZero), finite), -1.44269504f, C::kTwiceCoarse);
  }
}

template <typename V>
inline V log(V x) {
  using A = Lane<V>;
  using C = Constants<A>;
  const auto tiny = x < std::numeric_limits<A>::min();
  const V scaled = tiny ? x * A(int64_t(1) << C::kMantissaBits) : x;
  // the exponent counts from the bits of sqrt(1/2), so that m is around 1
  const UnsignedOf<V> bits = bits_as<UnsignedOf<V>>(scaled);
  const UnsignedOf<V> root = bits_as<UnsignedOf<V>>(splat<V>(A(0.707106781186547524401)));
  const IntOf<V> exponent = bits_as<IntOf<V>>(bits - root) >> C::kMantissaBits;
  const V m = bits_as<V>(bits - (bits_as<UnsignedOf<V>>(exponent) << C::kMantissaBits));
  const V whole = __builtin_convertvector(exponent, V);
  const V e = tiny ? whole - A(C::kMantissaBits) : whole;
  const V s = (m - 1) / (m + 1), twice = s + s;
  const V rest = twice * (s * s) * polynomial(s * s, C::kLog);
  const V y = e * C::kLog2High + (e * C::kLog2Low + (twice + rest));
  const V limit = x == 0 ? splat<V>(-std::numeric_limits<A>::infinity()) : x;
  const V special = x < 0 ? splat<V>(std::numeric_limits<A>::quiet_NaN()) : limit;
  return ((x > 0) & (x <= std::numeric_limits<A>::max())) ? y : special;
}

template <typename V>
struct Tanh {
  V value, slope;

  explicit Tanh(V x) {
    const V a = smaller(splat<V>(Constants<Lane<V>>::kTanhOne), magnitude(x));
    const Exp<V> e(a + a);
    const V less_one = e.rest * e.scale + (2 * e.scale - 1);  // exp(2 a) - 1
    const V t = less_one / (less_one + 2);
    value = with_sign_of(t, x);
    slope = 2 / (less_one + 2) * (1 + t);  // (1 - t) (1 + t) without a difference
  }
};

// The standard normal distribution at x.
template <typename V>
struct Normal {
  V density, below;

  explicit Normal(V x) {
    using A = Lane<V>;
    using C = Constants<A>;
    // there is no density beyond: the power is 0 there
    const V a = smaller(splat<V>(std::is_same_v<A, float> ? A(13.23) : A(37.643)), magnitude(x));
    constexpr A kAtZero = 0.398942280401432677940;
    V tail;
    if constexpr (std::is_same_v<A, float>) {
      const V power = power_of_two(a * a, -0.72134752f, C::kTwice);
      density = power * kAtZero;
      tail = power * polynomial(a, C::kTailP) / polynomial(a, C::kTailQ);
    } else {
      const Exp<V> e(a * a * A(-0.5));
      density = (2 + e.rest) * e.scale * kAtZero;
      const V t = 4 / (4 + a);
      tail = density * t * polynomial(a * t * A(0.25), C::kMills);
    }
    below = x < 0 ? tail : 1 - tail;
  }
};

}  // namespace metalcore::simd
