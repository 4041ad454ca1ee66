// SPDX-License-Identifier: MIT
// <metal_integer> and the functions that integers and floats share: min, max, clamp, abs.
#pragma once

namespace metal {
// Holds the product of two numbers of type T.
template <typename T>
using msl_product_of =
    conditional_t<(sizeof(T) < 8), conditional_t<is_signed_v<T>, long, ulong>,
                  conditional_t<is_signed_v<T>, signed _BitInt(128), unsigned _BitInt(128)>>;

#define MSL_MIN_MAX(t)                                                      \
  inline constexpr t min(t a, t b) { return b < a ? b : a; }                \
  inline constexpr t max(t a, t b) { return a < b ? b : a; }                \
  inline constexpr t clamp(t x, t lo, t hi) { return min(max(x, lo), hi); } \
  inline constexpr t min3(t a, t b, t c) { return min(a, min(b, c)); }      \
  inline constexpr t max3(t a, t b, t c) { return max(a, max(b, c)); }      \
  inline constexpr t median3(t a, t b, t c) { return max(min(a, b), min(max(a, b), c)); }
#define MSL_INTEGER(t)                                                                            \
  MSL_MIN_MAX(t)                                                                                  \
  inline constexpr t abs(t a) { return a < t(0) ? t(-a) : a; }                                    \
  inline constexpr make_unsigned_t<t> absdiff(t a, t b) {                                         \
    using U = make_unsigned_t<t>;                                                                 \
    return a < b ? U(U(b) - U(a)) : U(U(a) - U(b));                                               \
  }                                                                                               \
  inline constexpr t popcount(t a) { return t(__builtin_popcountll(make_unsigned_t<t>(a))); }     \
  inline constexpr t clz(t a) {                                                                   \
    return a == 0 ? t(sizeof(t) * 8)                                                              \
                  : t(__builtin_clzll(make_unsigned_t<t>(a)) - int(64 - sizeof(t) * 8));          \
  }                                                                                               \
  inline constexpr t ctz(t a) {                                                                   \
    return a == 0 ? t(sizeof(t) * 8) : t(__builtin_ctzll(make_unsigned_t<t>(a)));                 \
  }                                                                                               \
  inline constexpr t mulhi(t a, t b) {                                                            \
    using P = msl_product_of<t>;                                                                  \
    return t((P(a) * P(b)) >> (sizeof(t) * 8));                                                   \
  }                                                                                               \
  inline constexpr t madhi(t a, t b, t c) { return t(mulhi(a, b) + c); }                          \
  inline constexpr t madsat(t a, t b, t c) {                                                      \
    using P = msl_product_of<t>;                                                                  \
    const P all = P(a) * P(b) + P(c);                                                             \
    const P low = numeric_limits<t>::min(), high = numeric_limits<t>::max();                      \
    return t(all < low ? low : all > high ? high : all);                                          \
  }                                                                                               \
  inline constexpr t hadd(t a, t b) { return t((a & b) + ((a ^ b) >> 1)); }                       \
  inline constexpr t rhadd(t a, t b) { return t((a | b) - ((a ^ b) >> 1)); }                      \
  inline constexpr t rotate(t a, t b) {                                                           \
    using U = make_unsigned_t<t>;                                                                 \
    const int k = int(b) & int(sizeof(t) * 8 - 1);                                                \
    return k ? t(U(U(a) << k) | U(U(a) >> (sizeof(t) * 8 - k))) : a;                              \
  }                                                                                               \
  inline constexpr t addsat(t a, t b) {                                                           \
    t r{};                                                                                        \
    if (!__builtin_add_overflow(a, b, &r)) return r;                                              \
    return b < t(0) ? numeric_limits<t>::min() : numeric_limits<t>::max();                        \
  }                                                                                               \
  inline constexpr t subsat(t a, t b) {                                                           \
    t r{};                                                                                        \
    if (!__builtin_sub_overflow(a, b, &r)) return r;                                              \
    return b > t(0) ? numeric_limits<t>::min() : numeric_limits<t>::max();                        \
  }                                                                                               \
  inline constexpr t extract_bits(t a, uint offset, uint bits) {                                  \
    using U = make_unsigned_t<t>;                                                                 \
    const uint width = sizeof(t) * 8;                                                             \
    return bits == 0 ? t(0) : t(t(U(a) << (width - offset - bits)) >> (width - bits));            \
  }                                                                                               \
  inline constexpr t insert_bits(t a, t part, uint offset, uint bits) {                           \
    using U = make_unsigned_t<t>;                                                                 \
    const U mask = bits >= sizeof(t) * 8 ? U(~U(0)) : U((U(1) << bits) - 1);                      \
    return t((U(a) & U(~U(mask << offset))) | U((U(part) & mask) << offset));                     \
  }                                                                                               \
  inline constexpr t reverse_bits(t a) {                                                          \
    using U = make_unsigned_t<t>;                                                                 \
    U from = U(a), to = 0;                                                                        \
    for (uint i = 0; i < sizeof(t) * 8; ++i, from = U(from >> 1)) to = U((to << 1) | (from & 1)); \
    return t(to);                                                                                 \
  }
MSL_INTEGER(char)
MSL_INTEGER(int8_t)
MSL_INTEGER(uchar)
MSL_INTEGER(short)
MSL_INTEGER(ushort)
MSL_INTEGER(int)
MSL_INTEGER(uint)
MSL_INTEGER(long)
MSL_INTEGER(ulong)
#undef MSL_INTEGER
#undef MSL_MIN_MAX
// Of the low 24 bits.
inline constexpr int mul24(int a, int b) {
  return int((uint(a) << 8)) / 256 * (int(uint(b) << 8) / 256);
}
inline constexpr uint mul24(uint a, uint b) { return (a & 0xffffffu) * (b & 0xffffffu); }
inline constexpr int mad24(int a, int b, int c) { return mul24(a, b) + c; }
inline constexpr uint mad24(uint a, uint b, uint c) { return mul24(a, b) + c; }
MSL_VECTOR_2(mul24)
MSL_VECTOR_3(mad24)

MSL_FLOAT_2(min, __builtin_fminf(x, y))
MSL_FLOAT_2(max, __builtin_fmaxf(x, y))
inline float clamp(float x, float lo, float hi) { return min(max(x, lo), hi); }
inline half clamp(half x, half lo, half hi) { return min(max(x, lo), hi); }
inline float min3(float a, float b, float c) { return min(a, min(b, c)); }
inline half min3(half a, half b, half c) { return min(a, min(b, c)); }
inline float max3(float a, float b, float c) { return max(a, max(b, c)); }
inline half max3(half a, half b, half c) { return max(a, max(b, c)); }
inline float median3(float a, float b, float c) { return fmedian3(a, b, c); }
inline half median3(half a, half b, half c) { return fmedian3(a, b, c); }
MSL_FLOAT_1(abs, __builtin_fabsf(x))
MSL_BFLOAT_3(clamp)
MSL_BFLOAT_3(min3)
MSL_BFLOAT_3(max3)
MSL_BFLOAT_3(median3)
MSL_VECTOR_3(clamp)
MSL_VECTOR_3(min3)
MSL_VECTOR_3(max3)
MSL_VECTOR_3(median3)
MSL_VECTOR_1(popcount)
MSL_VECTOR_1(clz)
MSL_VECTOR_1(ctz)
MSL_VECTOR_1(reverse_bits)
template <typename T, int N>
inline vec<make_unsigned_t<T>, N> absdiff(vec<T, N> a, vec<T, N> b) {
  vec<make_unsigned_t<T>, N> r{};
  for (int i = 0; i < N; ++i) r.set(i, absdiff(a.get(i), b.get(i)));
  return r;
}
template <typename T, int N>
inline vec<T, N> extract_bits(vec<T, N> a, uint offset, uint bits) {
  vec<T, N> r{};
  for (int i = 0; i < N; ++i) r.set(i, extract_bits(a.get(i), offset, bits));
  return r;
}
template <typename T, int N>
inline vec<T, N> insert_bits(vec<T, N> a, vec<T, N> part, uint offset, uint bits) {
  vec<T, N> r{};
  for (int i = 0; i < N; ++i) r.set(i, insert_bits(a.get(i), part.get(i), offset, bits));
  return r;
}
MSL_VECTOR_2(hadd)
MSL_VECTOR_2(rhadd)
MSL_VECTOR_3(madhi)
MSL_VECTOR_3(madsat)
MSL_VECTOR_2(mulhi)
MSL_VECTOR_2(rotate)
MSL_VECTOR_2(addsat)
MSL_VECTOR_2(subsat)

// Both are computed precisely here; the names only select, as in Metal. Declared one by one,
// because kernel libraries add overloads of their own to these namespaces.
// clang-format off
#define MSL_PRECISE_NAMES \
  using metal::abs; using metal::acos; using metal::acosh; using metal::asin; \
  using metal::asinh; using metal::atan; using metal::atan2; using metal::atanh; \
  using metal::ceil; using metal::clamp; using metal::copysign; using metal::cos; \
  using metal::cosh; using metal::cospi; using metal::distance; using metal::divide; \
  using metal::dot; using metal::exp; using metal::exp10; using metal::exp2; using metal::fabs; \
  using metal::fdim; using metal::floor; using metal::fma; using metal::fmax; \
  using metal::fmax3; using metal::fmedian3; using metal::fmin; using metal::fmin3; \
  using metal::fmod; using metal::fract; using metal::isfinite; using metal::isinf; \
  using metal::isnan; using metal::ldexp; using metal::length; using metal::log; \
  using metal::log10; using metal::log2; using metal::max; using metal::max3; \
  using metal::median3; using metal::min; using metal::min3; using metal::mix; \
  using metal::nextafter; using metal::normalize; using metal::pow; using metal::powr; \
  using metal::rint; using metal::round; using metal::rsqrt; using metal::saturate; \
  using metal::sign; using metal::signbit; using metal::sin; using metal::sincos; \
  using metal::sinh; using metal::sinpi; using metal::smoothstep; using metal::sqrt; \
  using metal::step; using metal::tan; using metal::tanh; using metal::tanpi; \
  using metal::trunc;
// clang-format on
namespace fast {
MSL_PRECISE_NAMES
}
namespace precise {
MSL_PRECISE_NAMES
}
#undef MSL_PRECISE_NAMES
}  // namespace metal
