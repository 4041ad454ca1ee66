// SPDX-License-Identifier: MIT
// <metal_math>, <metal_common>, <metal_geometric>, <metal_relational>. Half is computed in float
// and rounded once. There are no bfloat overloads: a bfloat argument converts to float, as in
// Metal.
#pragma once

extern "C" {
float tanf(float);
float asinf(float);
float acosf(float);
float atanf(float);
float sinhf(float);
float coshf(float);
float tanhf(float);
float asinhf(float);
float acoshf(float);
float atanhf(float);
float atan2f(float, float);
float powf(float, float);
float fmodf(float, float);
float ldexpf(float, int);
float frexpf(float, int*);
float remainderf(float, float);
float nextafterf(float, float);
}

namespace metal {
#define MSL_VECTOR_1(f)                                    \
  template <typename T, int N>                             \
  inline auto f(vec<T, N> a) -> vec<decltype(f(T{})), N> { \
    vec<decltype(f(T{})), N> r{};                          \
    for (int i = 0; i < N; ++i) r.set(i, f(a.get(i)));     \
    return r;                                              \
  }                                                        \
  template <typename T, int N>                             \
  inline auto f(packed_vec<T, N> a) {                      \
    return f(vec<T, N>(a));                                \
  }
#define MSL_PACKED_2(f)                                                                         \
  template <typename A, typename B, enable_if_t<msl_is_packed<A> || msl_is_packed<B>, int> = 0> \
  inline auto f(A a, B b) {                                                                     \
    return f(msl_unpacked(a), msl_unpacked(b));                                                 \
  }
#define MSL_VECTOR_2(f)                                          \
  template <typename T, int N>                                   \
  inline vec<T, N> f(vec<T, N> a, vec<T, N> b) {                 \
    vec<T, N> r{};                                               \
    for (int i = 0; i < N; ++i) r.set(i, f(a.get(i), b.get(i))); \
    return r;                                                    \
  }                                                              \
  template <typename T, int N>                                   \
  inline vec<T, N> f(vec<T, N> a, type_identity_t<T> b) {        \
    return f(a, vec<T, N>(b));                                   \
  }                                                              \
  template <typename T, int N>                                   \
  inline vec<T, N> f(type_identity_t<T> a, vec<T, N> b) {        \
    return f(vec<T, N>(a), b);                                   \
  }                                                              \
  MSL_PACKED_2(f)
#define MSL_VECTOR_3(f)                                                                         \
  template <typename T, int N>                                                                  \
  inline vec<T, N> f(vec<T, N> a, type_identity_t<vec<T, N>> b, type_identity_t<vec<T, N>> c) { \
    vec<T, N> r{};                                                                              \
    for (int i = 0; i < N; ++i) r.set(i, f(a.get(i), b.get(i), c.get(i)));                      \
    return r;                                                                                   \
  }                                                                                             \
  template <typename A, typename T, int N, enable_if_t<msl_is_number<A>, int> = 0>              \
  inline vec<T, N> f(A a, type_identity_t<vec<T, N>> b, vec<T, N> c) {                          \
    return f(vec<T, N>(a), b, c);                                                               \
  }
#define MSL_FLOAT_1(f, expression)               \
  inline float f(float x) { return expression; } \
  inline half f(half h) {                        \
    float x = h;                                 \
    return half(expression);                     \
  }                                              \
  template <typename B, msl_if_bfloat<B> = 0>    \
  inline float f(B x) {                          \
    return f(float(x));                          \
  }                                              \
  MSL_VECTOR_1(f)
// A bfloat beside a float or another bfloat, by conversion of both.
#define MSL_BFLOAT_2(f)                                                                    \
  template <typename A, typename B,                                                        \
            enable_if_t<(MSL_IS_BFLOAT(A) && (MSL_IS_BFLOAT(B) || __is_same(B, float))) || \
                            (__is_same(A, float) && MSL_IS_BFLOAT(B)),                     \
                        int> = 0>                                                          \
  inline float f(A a, B b) {                                                               \
    return f(float(a), float(b));                                                          \
  }
#define MSL_BFLOAT_3(f)                                                               \
  template <typename A, typename B, typename C,                                       \
            enable_if_t<(MSL_IS_BFLOAT(A) || MSL_IS_BFLOAT(B) || MSL_IS_BFLOAT(C)) && \
                            (MSL_IS_BFLOAT(A) || __is_same(A, float)) &&              \
                            (MSL_IS_BFLOAT(B) || __is_same(B, float)) &&              \
                            (MSL_IS_BFLOAT(C) || __is_same(C, float)),                \
                        int> = 0>                                                     \
  inline float f(A a, B b, C c) {                                                     \
    return f(float(a), float(b), float(c));                                           \
  }
#define MSL_FLOAT_2(f, expression)                        \
  inline float f(float x, float y) { return expression; } \
  inline half f(half g, half h) {                         \
    float x = g, y = h;                                   \
    return half(expression);                              \
  }                                                       \
  MSL_BFLOAT_2(f)                                         \
  MSL_VECTOR_2(f)
#define MSL_FLOAT_3(f, expression)                                 \
  inline float f(float x, float y, float z) { return expression; } \
  inline half f(half g, half h, half i) {                          \
    float x = g, y = h, z = i;                                     \
    return half(expression);                                       \
  }                                                                \
  MSL_BFLOAT_3(f)                                                  \
  MSL_VECTOR_3(f)

MSL_FLOAT_1(exp, __builtin_expf(x))
MSL_FLOAT_1(exp2, __builtin_exp2f(x))
MSL_FLOAT_1(exp10, powf(10.0f, x))
MSL_FLOAT_1(log, __builtin_logf(x))
MSL_FLOAT_1(log2, __builtin_log2f(x))
MSL_FLOAT_1(log10, __builtin_log10f(x))
MSL_FLOAT_1(sin, __builtin_sinf(x))
MSL_FLOAT_1(cos, __builtin_cosf(x))
MSL_FLOAT_1(tan, tanf(x))
MSL_FLOAT_1(asin, asinf(x))
MSL_FLOAT_1(acos, acosf(x))
MSL_FLOAT_1(atan, atanf(x))
MSL_FLOAT_1(sinh, sinhf(x))
MSL_FLOAT_1(cosh, coshf(x))
MSL_FLOAT_1(tanh, tanhf(x))
MSL_FLOAT_1(asinh, asinhf(x))
MSL_FLOAT_1(acosh, acoshf(x))
MSL_FLOAT_1(atanh, atanhf(x))
MSL_FLOAT_1(sinpi, float(__builtin_sin(3.14159265358979323846 * x)))
MSL_FLOAT_1(cospi, float(__builtin_cos(3.14159265358979323846 * x)))
MSL_FLOAT_1(tanpi, float(__builtin_tan(3.14159265358979323846 * x)))
MSL_FLOAT_1(sqrt, __builtin_sqrtf(x))
MSL_FLOAT_1(rsqrt, 1.0f / __builtin_sqrtf(x))
MSL_FLOAT_1(fabs, __builtin_fabsf(x))
MSL_FLOAT_1(floor, __builtin_floorf(x))
MSL_FLOAT_1(ceil, __builtin_ceilf(x))
MSL_FLOAT_1(trunc, __builtin_truncf(x))
MSL_FLOAT_1(rint, __builtin_rintf(x))
MSL_FLOAT_1(round, __builtin_roundf(x))
MSL_FLOAT_1(fract, __builtin_fminf(x - __builtin_floorf(x), 0.99999994f))
MSL_FLOAT_1(sign, (x > 0 ? 1.0f : x < 0 ? -1.0f : x == 0 ? x : 0.0f))
MSL_FLOAT_1(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))
MSL_FLOAT_2(pow, powf(x, y))
MSL_FLOAT_2(powr, powf(x, y))
MSL_FLOAT_2(atan2, atan2f(x, y))
MSL_FLOAT_2(fmod, fmodf(x, y))
MSL_FLOAT_2(remainder, remainderf(x, y))
MSL_FLOAT_2(fmin, __builtin_fminf(x, y))
MSL_FLOAT_2(fmax, __builtin_fmaxf(x, y))
MSL_FLOAT_2(fdim, (x > y ? x - y : 0.0f))
MSL_FLOAT_2(copysign, __builtin_copysignf(x, y))
MSL_FLOAT_2(step, (y < x ? 0.0f : 1.0f))
MSL_FLOAT_2(divide, x / y)
MSL_FLOAT_3(mix, x + (y - x) * z)
MSL_FLOAT_3(fmin3, __builtin_fminf(x, __builtin_fminf(y, z)))
MSL_FLOAT_3(fmax3, __builtin_fmaxf(x, __builtin_fmaxf(y, z)))
MSL_FLOAT_3(fmedian3,
            __builtin_fmaxf(__builtin_fminf(x, y), __builtin_fminf(__builtin_fmaxf(x, y), z)))
inline float msl_smooth(float t) { return t * t * (3.0f - 2.0f * t); }
MSL_FLOAT_3(smoothstep, msl_smooth(saturate((z - x) / (y - x))))

inline float nextafter(float x, float y) { return nextafterf(x, y); }
inline half nextafter(half x, half y) {
  if (x == y || x != x || y != y) return x == y ? y : x + y;
  ushort bits = __builtin_bit_cast(ushort, x);
  if (x == half(0)) return __builtin_bit_cast(half, ushort(y > x ? 1 : 0x8001));
  bits = ushort(bits + (((y > x) == (x > half(0))) ? 1 : -1));
  return __builtin_bit_cast(half, bits);
}
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline half fma(half a, half b, half c) {
#ifdef __SPIR__
  return half(__builtin_fmaf(float(a), float(b), float(c)));
#else
  // The product is exact in float. The sum is rounded to odd, so that the rounding to half is the
  // only one.
  const float product = float(a) * float(b);
  const float sum = product + float(c);
  const float part = sum - product;
  const float error = (product - (sum - part)) + (float(c) - part);
  uint bits = __builtin_bit_cast(uint, sum);
  if (error != 0.0f && __builtin_isfinite(sum) && !(bits & 1)) {
    bits += (error > 0.0f) == (sum > 0.0f) ? 1u : ~0u;
  }
  return half(__builtin_bit_cast(float, bits));
#endif
}
MSL_BFLOAT_3(fma)
MSL_VECTOR_3(fma)
inline float ldexp(float x, int k) { return ldexpf(x, k); }
inline half ldexp(half x, int k) { return half(ldexpf(float(x), k)); }
template <typename T, int N>
inline vec<T, N> ldexp(vec<T, N> x, vec<int, N> k) {
  vec<T, N> r{};
  for (int i = 0; i < N; ++i) r.set(i, ldexp(x.get(i), k.get(i)));
  return r;
}
inline float frexp(float x, int& e) { return frexpf(x, &e); }
inline half frexp(half x, int& e) { return half(frexpf(float(x), &e)); }
template <typename T, int N>
inline vec<T, N> frexp(vec<T, N> x, vec<int, N>& e) {
  vec<T, N> r{};
  for (int i = 0; i < N; ++i) {
    int k = 0;
    r.set(i, frexp(x.get(i), k));
    e.set(i, k);
  }
  return r;
}
inline int ilogb(float x) { return __builtin_ilogbf(x); }
inline int ilogb(half x) { return __builtin_ilogbf(float(x)); }
MSL_VECTOR_1(ilogb)
// Functions with a second result, by reference.
#define MSL_SECOND(f, first, second)              \
  inline float f(float x, float& other) {         \
    other = second;                               \
    return first;                                 \
  }                                               \
  inline half f(half h, half& o) {                \
    const float x = h;                            \
    float other = second;                         \
    o = half(other);                              \
    return half(first);                           \
  }                                               \
  template <typename T, int N>                    \
  inline vec<T, N> f(vec<T, N> x, vec<T, N>& o) { \
    vec<T, N> r{};                                \
    for (int i = 0; i < N; ++i) {                 \
      T other{};                                  \
      r.set(i, f(x.get(i), other));               \
      o.set(i, other);                            \
    }                                             \
    return r;                                     \
  }
MSL_SECOND(modf, (__builtin_isinf(x) ? __builtin_copysignf(0.0f, x) : x - other),
           __builtin_truncf(x))
MSL_SECOND(sincos, __builtin_sinf(x), __builtin_cosf(x))
#undef MSL_SECOND

#define MSL_TEST(f, expression)                 \
  inline bool f(float x) { return expression; } \
  inline bool f(half h) {                       \
    float x = h;                                \
    return expression;                          \
  }                                             \
  template <typename B, msl_if_bfloat<B> = 0>   \
  inline bool f(B x) {                          \
    return f(float(x));                         \
  }                                             \
  MSL_VECTOR_1(f)
MSL_TEST(isnan, __builtin_isnan(x))
MSL_TEST(isinf, __builtin_isinf(x) != 0)
MSL_TEST(isfinite, __builtin_isfinite(x))
MSL_TEST(isnormal, __builtin_isnormal(x))
MSL_TEST(signbit, __builtin_signbit(x) != 0)
inline bool isunordered(float a, float b) { return __builtin_isunordered(a, b); }
inline bool isordered(float a, float b) { return !__builtin_isunordered(a, b); }
template <typename T, int N>
inline vec<bool, N> isunordered(vec<T, N> a, vec<T, N> b) {
  return isnan(a) || isnan(b);
}
template <typename T, int N>
inline vec<bool, N> isordered(vec<T, N> a, vec<T, N> b) {
  return !isunordered(a, b);
}

template <typename T, enable_if_t<msl_is_number<T>, int> = 0>
inline constexpr T select(T a, type_identity_t<T> b, bool c) {
  return c ? b : a;
}
template <typename T, int N>
inline vec<T, N> select(vec<T, N> a, type_identity_t<vec<T, N>> b, vec<bool, N> c) {
  vec<T, N> r{};
  for (int i = 0; i < N; ++i) r.set(i, c.get(i) ? b.get(i) : a.get(i));
  return r;
}
template <typename T, int N>
inline vec<T, N> select(vec<T, N> a, type_identity_t<vec<T, N>> b, bool c) {
  return c ? b : a;
}
inline bool any(bool b) { return b; }
inline bool all(bool b) { return b; }
template <int N>
inline bool any(vec<bool, N> v) {
  bool r = false;
  for (int i = 0; i < N; ++i) r = r || v.get(i);
  return r;
}
template <int N>
inline bool all(vec<bool, N> v) {
  bool r = true;
  for (int i = 0; i < N; ++i) r = r && v.get(i);
  return r;
}

template <typename T, int N>
inline T dot(vec<T, N> a, type_identity_t<vec<T, N>> b) {
  T r = T(a.get(0) * b.get(0));
  for (int i = 1; i < N; ++i) r = T(r + a.get(i) * b.get(i));
  return r;
}
template <typename T, int N>
inline T length_squared(vec<T, N> a) {
  return dot(a, a);
}
template <typename T, int N>
inline T length(vec<T, N> a) {
  return sqrt(dot(a, a));
}
template <typename T, int N>
inline T distance(vec<T, N> a, type_identity_t<vec<T, N>> b) {
  return length(a - b);
}
template <typename T, int N>
inline T distance_squared(vec<T, N> a, type_identity_t<vec<T, N>> b) {
  return dot(a - b, a - b);
}
template <typename T, int N>
inline vec<T, N> normalize(vec<T, N> a) {
  return a * vec<T, N>(rsqrt(dot(a, a)));
}
template <typename T>
inline vec<T, 3> cross(vec<T, 3> a, type_identity_t<vec<T, 3>> b) {
  const vec<T, 3> a1 = a.yzx, a2 = a.zxy, b1 = b.zxy, b2 = b.yzx;
  return a1 * b1 - a2 * b2;
}
// `towards` and `normal` as in the specification: I and N, with the normal turned against I.
template <typename T, int N>
inline vec<T, N> faceforward(vec<T, N> normal, type_identity_t<vec<T, N>> towards,
                             type_identity_t<vec<T, N>> reference) {
  return dot(reference, towards) < T(0) ? normal : -normal;
}
template <typename T, int N>
inline vec<T, N> reflect(vec<T, N> towards, type_identity_t<vec<T, N>> normal) {
  return towards - vec<T, N>(T(T(2) * dot(normal, towards))) * normal;
}
template <typename T, int N>
inline vec<T, N> refract(vec<T, N> towards, type_identity_t<vec<T, N>> normal,
                         type_identity_t<T> eta) {
  const T cosine = dot(normal, towards);
  const T k = T(T(1) - eta * eta * (T(1) - cosine * cosine));
  if (k < T(0)) return vec<T, N>(T(0));
  return vec<T, N>(eta) * towards - vec<T, N>(T(eta * cosine + sqrt(k))) * normal;
}
#define MSL_PACKED_1(f)               \
  template <typename T, int N>        \
  inline auto f(packed_vec<T, N> a) { \
    return f(vec<T, N>(a));           \
  }
MSL_PACKED_1(length)
MSL_PACKED_1(length_squared)
MSL_PACKED_1(normalize)
#undef MSL_PACKED_1
MSL_PACKED_2(dot)
MSL_PACKED_2(distance)
MSL_PACKED_2(distance_squared)
MSL_PACKED_2(cross)
MSL_PACKED_2(reflect)
}  // namespace metal
