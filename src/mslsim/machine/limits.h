// SPDX-License-Identifier: MIT
// numeric_limits and the numeric macros of <metal_limits> and <metal_math>.
#pragma once

namespace metal {
template <typename T>
struct _numeric_limits_impl {
  static constexpr bool is_specialized = false;
};
template <typename T>
struct numeric_limits : _numeric_limits_impl<T> {};
template <typename T>
struct numeric_limits<const T> : numeric_limits<T> {};

#define MSL_LIMITS(type, low, high)                             \
  template <>                                                   \
  struct _numeric_limits_impl<type> {                           \
    static constexpr bool is_specialized = true;                \
    static constexpr bool is_signed = type(-1) < type(0);       \
    static constexpr bool is_integer = true;                    \
    static constexpr bool has_infinity = false;                 \
    static constexpr bool has_quiet_NaN = false;                \
    static constexpr int digits = sizeof(type) * 8 - is_signed; \
    static constexpr type min() { return low; }                 \
    static constexpr type max() { return high; }                \
    static constexpr type lowest() { return low; }              \
    static constexpr type infinity() { return 0; }              \
  };
MSL_LIMITS(bool, false, true)
MSL_LIMITS(char, -128, 127)
MSL_LIMITS(int8_t, -128, 127)
MSL_LIMITS(uchar, 0, 255)
MSL_LIMITS(short, -32768, 32767)
MSL_LIMITS(ushort, 0, 65535)
MSL_LIMITS(int, -2147483647 - 1, 2147483647)
MSL_LIMITS(uint, 0, 4294967295u)
MSL_LIMITS(long, -9223372036854775807L - 1, 9223372036854775807L)
MSL_LIMITS(ulong, 0, 18446744073709551615UL)
#undef MSL_LIMITS

#define MSL_FLOAT_LIMITS(type, bits, digits_, digits10_, min_exp, max_exp, low, high, eps, tiny, \
                         inf, nan)                                                               \
  template <>                                                                                    \
  struct _numeric_limits_impl<type> {                                                            \
    static constexpr bool is_specialized = true;                                                 \
    static constexpr bool is_signed = true;                                                      \
    static constexpr bool is_integer = false;                                                    \
    static constexpr bool has_infinity = true;                                                   \
    static constexpr bool has_quiet_NaN = true;                                                  \
    static constexpr int digits = digits_;                                                       \
    static constexpr int digits10 = digits10_;                                                   \
    static constexpr int min_exponent = min_exp;                                                 \
    static constexpr int max_exponent = max_exp;                                                 \
    static constexpr type of(bits b) { return __builtin_bit_cast(type, b); }                     \
    static constexpr type min() { return of(low); }                                              \
    static constexpr type max() { return of(high); }                                             \
    static constexpr type lowest() { return -of(high); }                                         \
    static constexpr type epsilon() { return of(eps); }                                          \
    static constexpr type denorm_min() { return of(tiny); }                                      \
    static constexpr type infinity() { return of(inf); }                                         \
    static constexpr type quiet_NaN() { return of(nan); }                                        \
    static constexpr type signaling_NaN() { return of(nan); }                                    \
  };
MSL_FLOAT_LIMITS(float, uint, 24, 6, -125, 128, 0x00800000u, 0x7f7fffffu, 0x34000000u, 1u,
                 0x7f800000u, 0x7fc00000u)
MSL_FLOAT_LIMITS(half, ushort, 11, 3, -13, 16, ushort(0x0400), ushort(0x7bff), ushort(0x1400),
                 ushort(1), ushort(0x7c00), ushort(0x7e00))
MSL_FLOAT_LIMITS(bfloat, ushort, 8, 2, -125, 128, ushort(0x0080), ushort(0x7f7f), ushort(0x3c00),
                 ushort(1), ushort(0x7f80), ushort(0x7fc0))
#undef MSL_FLOAT_LIMITS

// Those of a vector are those of its elements, in each.
template <typename T, int N>
struct _numeric_limits_impl<vec<T, N>> : numeric_limits<T> {
#define MSL_OF_ELEMENTS(name) \
  static constexpr vec<T, N> name() { return vec<T, N>(numeric_limits<T>::name()); }
  MSL_OF_ELEMENTS(min)
  MSL_OF_ELEMENTS(max)
  MSL_OF_ELEMENTS(lowest)
  MSL_OF_ELEMENTS(epsilon)
  MSL_OF_ELEMENTS(denorm_min)
  MSL_OF_ELEMENTS(infinity)
  MSL_OF_ELEMENTS(quiet_NaN)
  MSL_OF_ELEMENTS(signaling_NaN)
#undef MSL_OF_ELEMENTS
};
}  // namespace metal

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define HUGE_VALH half(__builtin_inff())
#define MAXFLOAT 3.40282347e38f
#define FLT_MAX 3.40282347e38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.1920929e-7f
#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define HALF_MAX half(65504.0f)
#define HALF_MIN half(6.103515625e-05f)
#define HALF_EPSILON half(0.0009765625f)
#define FLT_RADIX 2
#define FLT_MAX_EXP 128
#define FLT_MIN_EXP (-125)
#define FLT_MAX_10_EXP 38
#define FLT_MIN_10_EXP (-37)
#define HALF_DIG 2
#define HALF_MANT_DIG 11
#define HALF_MAX_EXP 16
#define HALF_MIN_EXP (-13)
#define HALF_MAX_10_EXP 4
#define HALF_MIN_10_EXP (-4)
#define HALF_RADIX 2
#define MAXHALF HALF_MAX
#define MSL_BFLOAT(bits) bfloat(bfloat::from_bits{}, ushort(bits))
#define MAXBFLOAT MSL_BFLOAT(0x7f7f)
#define HUGE_VALBF MSL_BFLOAT(0x7f80)
#define BFLT_MAX MSL_BFLOAT(0x7f7f)
#define BFLT_MIN MSL_BFLOAT(0x0080)
#define BFLT_EPSILON MSL_BFLOAT(0x3c00)
#define BFLT_DIG 2
#define BFLT_MANT_DIG 8
#define BFLT_MAX_EXP 128
#define BFLT_MIN_EXP (-125)
#define FP_ILOGB0 (-2147483647 - 1)
#define FP_ILOGBNAN (-2147483647 - 1)
#define CHAR_BIT 8
#define CHAR_MAX 127
#define CHAR_MIN (-128)
#define UCHAR_MAX 255
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807L
#define LONG_MIN (-9223372036854775807L - 1)
#define ULONG_MAX 18446744073709551615UL
#define MSL_CONSTANT(name, value)                 \
  constexpr float msl_##name##_F = value##f;      \
  constexpr half msl_##name##_H = half(value##f); \
  constexpr bfloat msl_##name##_BF = bfloat(value##f);
MSL_CONSTANT(M_E, 2.71828182845904523536)
MSL_CONSTANT(M_LOG2E, 1.44269504088896340736)
MSL_CONSTANT(M_LOG10E, 0.43429448190325182765)
MSL_CONSTANT(M_LN2, 0.69314718055994530942)
MSL_CONSTANT(M_LN10, 2.30258509299404568402)
MSL_CONSTANT(M_PI, 3.14159265358979323846)
MSL_CONSTANT(M_PI_2, 1.57079632679489661923)
MSL_CONSTANT(M_PI_4, 0.78539816339744830962)
MSL_CONSTANT(M_1_PI, 0.31830988618379067154)
MSL_CONSTANT(M_2_PI, 0.63661977236758134308)
MSL_CONSTANT(M_2_SQRTPI, 1.12837916709551257390)
MSL_CONSTANT(M_SQRT2, 1.41421356237309504880)
MSL_CONSTANT(M_SQRT1_2, 0.70710678118654752440)
#undef MSL_CONSTANT
#define M_E_F msl_M_E_F
#define M_LOG2E_F msl_M_LOG2E_F
#define M_LOG10E_F msl_M_LOG10E_F
#define M_LN2_F msl_M_LN2_F
#define M_LN10_F msl_M_LN10_F
#define M_PI_F msl_M_PI_F
#define M_PI_2_F msl_M_PI_2_F
#define M_PI_4_F msl_M_PI_4_F
#define M_1_PI_F msl_M_1_PI_F
#define M_2_PI_F msl_M_2_PI_F
#define M_2_SQRTPI_F msl_M_2_SQRTPI_F
#define M_SQRT2_F msl_M_SQRT2_F
#define M_SQRT1_2_F msl_M_SQRT1_2_F
#define M_E_H msl_M_E_H
#define M_LOG2E_H msl_M_LOG2E_H
#define M_LOG10E_H msl_M_LOG10E_H
#define M_LN2_H msl_M_LN2_H
#define M_LN10_H msl_M_LN10_H
#define M_PI_H msl_M_PI_H
#define M_PI_2_H msl_M_PI_2_H
#define M_PI_4_H msl_M_PI_4_H
#define M_1_PI_H msl_M_1_PI_H
#define M_2_PI_H msl_M_2_PI_H
#define M_2_SQRTPI_H msl_M_2_SQRTPI_H
#define M_SQRT2_H msl_M_SQRT2_H
#define M_SQRT1_2_H msl_M_SQRT1_2_H
#define M_E_BF msl_M_E_BF
#define M_LOG2E_BF msl_M_LOG2E_BF
#define M_LOG10E_BF msl_M_LOG10E_BF
#define M_LN2_BF msl_M_LN2_BF
#define M_LN10_BF msl_M_LN10_BF
#define M_PI_BF msl_M_PI_BF
#define M_PI_2_BF msl_M_PI_2_BF
#define M_PI_4_BF msl_M_PI_4_BF
#define M_1_PI_BF msl_M_1_PI_BF
#define M_2_PI_BF msl_M_2_PI_BF
#define M_2_SQRTPI_BF msl_M_2_SQRTPI_BF
#define M_SQRT2_BF msl_M_SQRT2_BF
#define M_SQRT1_2_BF msl_M_SQRT1_2_BF
