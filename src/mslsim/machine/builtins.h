// SPDX-License-Identifier: MIT
// The compiler's own names, which some kernel libraries call directly.
#pragma once

#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_CONST const
#define __METAL_MAYBE_FAST_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 2

#define MSL_BUILTIN_1(name) \
  inline float __metal_##name(float x, int = 0) { return metal::name(x); }
MSL_BUILTIN_1(acos)
MSL_BUILTIN_1(acosh)
MSL_BUILTIN_1(asin)
MSL_BUILTIN_1(asinh)
MSL_BUILTIN_1(atan)
MSL_BUILTIN_1(atanh)
MSL_BUILTIN_1(ceil)
MSL_BUILTIN_1(cos)
MSL_BUILTIN_1(cosh)
MSL_BUILTIN_1(cospi)
MSL_BUILTIN_1(exp)
MSL_BUILTIN_1(exp10)
MSL_BUILTIN_1(exp2)
MSL_BUILTIN_1(fabs)
MSL_BUILTIN_1(floor)
MSL_BUILTIN_1(fract)
MSL_BUILTIN_1(log)
MSL_BUILTIN_1(log10)
MSL_BUILTIN_1(log2)
MSL_BUILTIN_1(rint)
MSL_BUILTIN_1(round)
MSL_BUILTIN_1(rsqrt)
MSL_BUILTIN_1(sin)
MSL_BUILTIN_1(sinh)
MSL_BUILTIN_1(sinpi)
MSL_BUILTIN_1(sqrt)
MSL_BUILTIN_1(tan)
MSL_BUILTIN_1(tanh)
MSL_BUILTIN_1(tanpi)
MSL_BUILTIN_1(trunc)
#undef MSL_BUILTIN_1
#define MSL_BUILTIN_2(name) \
  inline float __metal_##name(float x, float y, int = 0) { return metal::name(x, y); }
MSL_BUILTIN_2(atan2)
MSL_BUILTIN_2(copysign)
MSL_BUILTIN_2(divide)
MSL_BUILTIN_2(fdim)
MSL_BUILTIN_2(fmax)
MSL_BUILTIN_2(fmin)
MSL_BUILTIN_2(fmod)
MSL_BUILTIN_2(nextafter)
MSL_BUILTIN_2(pow)
MSL_BUILTIN_2(powr)
#undef MSL_BUILTIN_2
#define MSL_BUILTIN_3(name) \
  inline float __metal_##name(float x, float y, float z, int = 0) { return metal::name(x, y, z); }
MSL_BUILTIN_3(fma)
MSL_BUILTIN_3(fmax3)
MSL_BUILTIN_3(fmedian3)
MSL_BUILTIN_3(fmin3)
#undef MSL_BUILTIN_3
inline float __metal_ldexp(float x, int k, int = 0) { return metal::ldexp(x, k); }
template <typename E>
inline float __metal_frexp(float x, E* e, int = 0) {
  int k = 0;
  const float m = metal::frexp(x, k);
  *e = E(k);
  return m;
}
inline ushort __metal_get_simdgroup_size(ushort) { return 32; }
inline ushort __metal_get_thread_index_in_simdgroup(ushort) { return ushort(msl_lane()); }

#define MSL_BUILTIN_LANES(name)       \
  template <typename T>               \
  inline T __metal_simd_##name(T x) { \
    return metal::simd_##name(x);     \
  }
MSL_BUILTIN_LANES(sum)
MSL_BUILTIN_LANES(product)
MSL_BUILTIN_LANES(max)
MSL_BUILTIN_LANES(min)
MSL_BUILTIN_LANES(broadcast_first)
MSL_BUILTIN_LANES(prefix_exclusive_sum)
MSL_BUILTIN_LANES(prefix_inclusive_sum)
MSL_BUILTIN_LANES(prefix_exclusive_product)
MSL_BUILTIN_LANES(prefix_inclusive_product)
#undef MSL_BUILTIN_LANES
// Declared for reals too, by wrappers that are generated for every type and never called.
#define MSL_BUILTIN_BITS(name)                   \
  template <typename T>                          \
  inline T __metal_simd_##name(T x) {            \
    if constexpr (metal::is_floating_point_v<T>) \
      return x;                                  \
    else                                         \
      return metal::simd_##name(x);              \
  }
MSL_BUILTIN_BITS(and)
MSL_BUILTIN_BITS(or)
MSL_BUILTIN_BITS(xor)
#undef MSL_BUILTIN_BITS
#define MSL_BUILTIN_SHUFFLE(name)               \
  template <typename T>                         \
  inline T __metal_simd_##name(T x, ushort n) { \
    return metal::simd_##name(x, n);            \
  }
MSL_BUILTIN_SHUFFLE(broadcast)
MSL_BUILTIN_SHUFFLE(shuffle)
MSL_BUILTIN_SHUFFLE(shuffle_xor)
MSL_BUILTIN_SHUFFLE(shuffle_down)
MSL_BUILTIN_SHUFFLE(shuffle_up)
MSL_BUILTIN_SHUFFLE(shuffle_rotate_down)
MSL_BUILTIN_SHUFFLE(shuffle_rotate_up)
#undef MSL_BUILTIN_SHUFFLE
template <typename T>
inline T __metal_simd_shuffle_and_fill_down(T x, T fill, ushort d, ushort modulo) {
  return metal::simd_shuffle_and_fill_down(x, fill, d, modulo);
}
template <typename T>
inline T __metal_simd_shuffle_and_fill_up(T x, T fill, ushort d, ushort modulo) {
  return metal::simd_shuffle_and_fill_up(x, fill, d, modulo);
}

inline void assert(bool holds) {
  if (!holds) msl_assertion_failed();
}
