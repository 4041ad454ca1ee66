// SPDX-License-Identifier: MIT
// <metal_pack>: small vectors of reals as the bits of one integer.
#pragma once

namespace metal {
// `BITS` of an integer as a real between 0 and 1, or -1 and 1.
template <int BITS>
inline float msl_from_unorm(uint bits) {
  constexpr uint most = (1u << BITS) - 1;
  return float(bits & most) / float(most);
}
template <int BITS>
inline float msl_from_snorm(uint bits) {
  constexpr int most = (1 << (BITS - 1)) - 1;
  const int value = int(bits << (32 - BITS)) >> (32 - BITS);
  return max(float(value) / float(most), -1.0f);
}
template <int BITS>
inline uint msl_to_unorm(float x) {
  return uint(rint(saturate(x) * float((1u << BITS) - 1)));
}
template <int BITS>
inline uint msl_to_snorm(float x) {
  const float bounded = x == x ? clamp(x, -1.0f, 1.0f) : 0.0f;
  return uint(int(rint(bounded * float((1 << (BITS - 1)) - 1)))) & ((1u << BITS) - 1);
}
inline float msl_to_linear(float c) {
  return c <= 0.04045f ? c / 12.92f : powf((c + 0.055f) / 1.055f, 2.4f);
}
inline float msl_to_srgb(float c) {
  return c <= 0.0031308f ? 12.92f * c : 1.055f * powf(c, 1.0f / 2.4f) - 0.055f;
}

#define MSL_PACK(kind, name, type, T, N, BITS)                                             \
  inline vec<T, N> unpack_##kind##name##_to_##T(type v) {                                  \
    vec<T, N> r{};                                                                         \
    for (int i = 0; i < N; ++i) r.set(i, T(msl_from_##kind<BITS>(uint(v >> (BITS * i))))); \
    return r;                                                                              \
  }                                                                                        \
  inline type pack_##T##_to_##kind##name(vec<T, N> v) {                                    \
    uint r = 0;                                                                            \
    for (int i = 0; i < N; ++i) r |= msl_to_##kind<BITS>(float(v.get(i))) << (BITS * i);   \
    return type(r);                                                                        \
  }
#define MSL_PACKS(name, type, N, BITS)        \
  MSL_PACK(unorm, name, type, float, N, BITS) \
  MSL_PACK(unorm, name, type, half, N, BITS)  \
  MSL_PACK(snorm, name, type, float, N, BITS) \
  MSL_PACK(snorm, name, type, half, N, BITS)
MSL_PACKS(4x8, uint, 4, 8)
MSL_PACKS(2x16, uint, 2, 16)
MSL_PACKS(2x8, ushort, 2, 8)
#undef MSL_PACKS
#undef MSL_PACK

#define MSL_PACK_MIXED(name, type, T, N, ...)                                             \
  inline vec<T, N> unpack_unorm##name##_to_##T(type v) {                                  \
    constexpr int widths[] = {__VA_ARGS__};                                               \
    vec<T, N> r{};                                                                        \
    uint bits = v;                                                                        \
    for (int i = 0; i < N; bits >>= widths[i++]) {                                        \
      const uint most = (1u << widths[i]) - 1;                                            \
      r.set(i, T(float(bits & most) / float(most)));                                      \
    }                                                                                     \
    return r;                                                                             \
  }                                                                                       \
  inline type pack_##T##_to_unorm##name(vec<T, N> v) {                                    \
    constexpr int widths[] = {__VA_ARGS__};                                               \
    uint r = 0, shift = 0;                                                                \
    for (int i = 0; i < N; shift += uint(widths[i++])) {                                  \
      r |= uint(rint(saturate(float(v.get(i))) * float((1u << widths[i]) - 1))) << shift; \
    }                                                                                     \
    return type(r);                                                                       \
  }
MSL_PACK_MIXED(10a2, uint, float, 4, 10, 10, 10, 2)
MSL_PACK_MIXED(565, ushort, float, 3, 5, 6, 5)
MSL_PACK_MIXED(10a2, uint, half, 4, 10, 10, 10, 2)
MSL_PACK_MIXED(565, ushort, half, 3, 5, 6, 5)
#undef MSL_PACK_MIXED

#define MSL_PACK_SRGB(T)                                                                 \
  inline vec<T, 4> unpack_unorm4x8_srgb_to_##T(uint v) {                                 \
    vec<float, 4> r = unpack_unorm4x8_to_float(v);                                       \
    for (int i = 0; i < 3; ++i) r.set(i, msl_to_linear(r.get(i)));                       \
    return vec<T, 4>(r);                                                                 \
  }                                                                                      \
  inline uint pack_##T##_to_srgb_unorm4x8(vec<T, 4> v) {                                 \
    vec<float, 4> r(float(v.get(0)), float(v.get(1)), float(v.get(2)), float(v.get(3))); \
    for (int i = 0; i < 3; ++i) r.set(i, msl_to_srgb(saturate(r.get(i))));               \
    return pack_float_to_unorm4x8(r);                                                    \
  }
MSL_PACK_SRGB(float)
MSL_PACK_SRGB(half)
#undef MSL_PACK_SRGB
inline half2 unpack_half2(uint v) { return as_type<half2>(v); }
}  // namespace metal
