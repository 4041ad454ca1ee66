// SPDX-License-Identifier: MIT
// One native register of float or double, and its conversions from and to the storage types.
//
// Registers are the compiler's vector types, so + - * / work on them and the same source serves
// every instruction set. Only half needs intrinsics: compilers do not convert it in vectors.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__)
#include <immintrin.h>
#define MC_REGISTER_BYTES 64
#elif defined(__AVX2__)
#include <immintrin.h>
#define MC_REGISTER_BYTES 32
#else
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#define MC_REGISTER_BYTES 16
#endif

namespace metalcore::simd {

using BFloat16 = c10::BFloat16;
using Half = c10::Half;

// The type sums are kept in.
template <typename T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;

typedef float FloatVec __attribute__((vector_size(MC_REGISTER_BYTES)));
typedef double DoubleVec __attribute__((vector_size(MC_REGISTER_BYTES)));
typedef uint32_t Bits __attribute__((vector_size(MC_REGISTER_BYTES)));
typedef uint16_t HalfBits __attribute__((vector_size(MC_REGISTER_BYTES / 2)));

template <typename A>
using Vec = std::conditional_t<std::is_same_v<A, double>, DoubleVec, FloatVec>;

template <typename A>
constexpr int64_t kLanes = MC_REGISTER_BYTES / sizeof(A);

// How many lanes of a register an access touches: all of them, or the first few at a row's end.
struct All {};
struct First {
  int64_t count;
};

template <typename To, typename From>
inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline FloatVec widen(HalfBits raw, BFloat16) {
  return bits_as<FloatVec>(__builtin_convertvector(raw, Bits) << 16);
}

inline HalfBits narrow(FloatVec v, BFloat16) {
  const Bits b = bits_as<Bits>(v);
  const Bits rounded = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
  const Bits is_number = bits_as<Bits>(v == v);
  return __builtin_convertvector((rounded & is_number) | (0x7fc0 & ~is_number), HalfBits);
}

inline FloatVec widen(HalfBits raw, Half) {
#if defined(__AVX512F__)
  return (FloatVec)_mm512_cvtph_ps((__m256i)raw);
#elif defined(__AVX2__)
  return (FloatVec)_mm256_cvtph_ps((__m128i)raw);
#elif defined(__aarch64__)
  return (FloatVec)vcvt_f32_f16((float16x4_t)raw);
#else
  FloatVec v;
  for (int64_t i = 0; i < kLanes<float>; ++i) v[i] = c10::detail::fp16_ieee_to_fp32_value(raw[i]);
  return v;
#endif
}

inline HalfBits narrow(FloatVec v, Half) {
#if defined(__AVX512F__)
  return (HalfBits)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
  return (HalfBits)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  return (HalfBits)vcvt_f16_f32((float32x4_t)v);
#else
  HalfBits raw;
  for (int64_t i = 0; i < kLanes<float>; ++i) raw[i] = c10::detail::fp16_ieee_from_fp32_value(v[i]);
  return raw;
#endif
}

template <typename T>
inline Vec<Acc<T>> load(const T* p, All = {}) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    Vec<T> v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  } else {
    HalfBits raw;
    std::memcpy(&raw, p, sizeof(raw));
    return widen(raw, T());
  }
}

template <typename T>
inline void store(T* p, Vec<Acc<T>> v, All = {}) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    std::memcpy(p, &v, sizeof(v));
  } else {
    const HalfBits raw = narrow(v, T());
    std::memcpy(p, &raw, sizeof(raw));
  }
}

// The lanes past `first` read as zero.
template <typename T>
inline Vec<Acc<T>> load(const T* p, First first) {
  alignas(MC_REGISTER_BYTES) unsigned char part[sizeof(T) * kLanes<Acc<T>>] = {};
  std::memcpy(part, p, sizeof(T) * first.count);
  return load(reinterpret_cast<const T*>(part));
}

template <typename T>
inline void store(T* p, Vec<Acc<T>> v, First first) {
  alignas(MC_REGISTER_BYTES) unsigned char part[sizeof(T) * kLanes<Acc<T>>];
  store(reinterpret_cast<T*>(part), v);
  std::memcpy(p, part, sizeof(T) * first.count);
}

// Calls body(i, All{}) for each whole register of a row of n, then body(i, First{rest}).
template <typename A, typename Body>
inline void for_each_register(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) body(i, All{});
  if (i < n) body(i, First{n - i});
}

// Sum over a row of n of term(i, lanes), in an order that depends on n alone.
template <typename A, typename Term>
inline A sum_over(int64_t n, Term term) {
  // Four chains hide the latency of an addition.
  constexpr int64_t kStep = kLanes<A>;
  Vec<A> s0 = {}, s1 = {}, s2 = {}, s3 = {};
  int64_t i = 0;
  for (; i + 4 * kStep <= n; i += 4 * kStep) {
    s0 += term(i, All{});
    s1 += term(i + kStep, All{});
    s2 += term(i + 2 * kStep, All{});
    s3 += term(i + 3 * kStep, All{});
  }
  for (; i + kStep <= n; i += kStep) s0 += term(i, All{});
  if (i < n) s1 += term(i, First{n - i});
  const Vec<A> s = (s0 + s1) + (s2 + s3);
  A total = 0;
  for (int64_t lane = 0; lane < kStep; ++lane) total += s[lane];
  return total;
}

}  // namespace metalcore::simd
