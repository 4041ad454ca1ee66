// SPDX-License-Identifier: MIT
// Two native registers of float or double, and their conversions from and to the storage types.
//
// Registers are the compiler's vector types, so the same source serves every instruction set. Only
// conversions of half are intrinsics, and stores past the caches.
//
// A Pair holds the next kStep<T> elements of an array of T in an order of T's own: bfloat16 has the
// even ones in the first register and the odd ones in the second, which needs no shuffles. Arrays
// of one type agree in it; slot<T>() tells it to code that mixes types.
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
typedef int32_t SignedBits __attribute__((vector_size(MC_REGISTER_BYTES)));
typedef uint16_t HalfBits __attribute__((vector_size(MC_REGISTER_BYTES / 2)));

template <typename A>
using Vec = std::conditional_t<std::is_same_v<A, double>, DoubleVec, FloatVec>;

template <typename A>
constexpr int64_t kLanes = MC_REGISTER_BYTES / sizeof(A);

// Elements in a Pair.
template <typename T>
constexpr int64_t kStep = 2 * kLanes<Acc<T>>;

template <typename A>
struct Pair {
  Vec<A> first, second;

  Pair operator+(Pair o) const { return {first + o.first, second + o.second}; }
  Pair operator-(Pair o) const { return {first - o.first, second - o.second}; }
  Pair operator*(Pair o) const { return {first * o.first, second * o.second}; }
  Pair operator*(A s) const { return {first * s, second * s}; }
  Pair operator-(A s) const { return {first - s, second - s}; }
  void operator+=(Pair o) {
    first += o.first;
    second += o.second;
  }
};

// Where element i of kStep<T> consecutive ones stands in a Pair.
template <typename T>
constexpr int64_t slot(int64_t i) {
  return std::is_same_v<T, BFloat16> ? i % 2 * kLanes<float> + i / 2 : i;
}

// How many elements an access touches: a whole Pair, or the first few of one at a row's end.
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

inline FloatVec widen(HalfBits raw) {
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

inline HalfBits narrow(FloatVec v) {
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

// v rounded to the nearest bfloat16, ties to even, in the upper halves; the lower ones are rubbish.
// A NaN must have a lower half of zeros, or it may round to a number: those of arithmetic and of
// bfloat16 inputs have, float32 inputs are to be cleaned first. 1.1x over a check of each value.
inline Bits round_to_bfloat16(FloatVec v) {
  const Bits b = bits_as<Bits>(v);
  return b + 0x7fff + ((b >> 16) & 1);
}

// Vectors are loaded and stored one by one: gcc keeps a struct that is copied whole in memory.
template <typename V>
inline V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

template <typename T>
inline Pair<Acc<T>> load(const T* p, All = {}) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const Bits raw = load_as<Bits>(p);
    return {bits_as<FloatVec>(raw << 16), bits_as<FloatVec>(raw & 0xffff0000)};
  } else if constexpr (std::is_same_v<T, Half>) {
    return {widen(load_as<HalfBits>(p)), widen(load_as<HalfBits>(p + kLanes<float>))};
  } else {
    return {load_as<Vec<T>>(p), load_as<Vec<T>>(p + kLanes<T>)};
  }
}

inline Bits encode(Pair<float> v, BFloat16) {
  return (round_to_bfloat16(v.first) >> 16) | (round_to_bfloat16(v.second) & 0xffff0000);
}

template <typename T>
inline void store(T* p, Pair<Acc<T>> v, All = {}) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const Bits raw = encode(v, T());
    std::memcpy(p, &raw, sizeof(raw));
  } else if constexpr (std::is_same_v<T, Half>) {
    const HalfBits low = narrow(v.first), high = narrow(v.second);
    std::memcpy(p, &low, sizeof(low));
    std::memcpy(p + kLanes<float>, &high, sizeof(high));
  } else {
    std::memcpy(p, &v.first, sizeof(v.first));
    std::memcpy(p + kLanes<T>, &v.second, sizeof(v.second));
  }
}

// The elements past `first` read as zero.
template <typename T>
inline Pair<Acc<T>> load(const T* p, First first) {
  alignas(MC_REGISTER_BYTES) unsigned char part[sizeof(T) * kStep<T>] = {};
  std::memcpy(part, p, sizeof(T) * first.count);
  return load(reinterpret_cast<const T*>(part));
}

template <typename T>
inline void store(T* p, Pair<Acc<T>> v, First first) {
  alignas(MC_REGISTER_BYTES) unsigned char part[sizeof(T) * kStep<T>];
  store(reinterpret_cast<T*>(part), v);
  std::memcpy(p, part, sizeof(T) * first.count);
}

#if defined(__AVX2__)
template <typename V>
inline void stream_register(void* p, V v) {
  if constexpr (sizeof(V) == 64) {
#if defined(__AVX512F__)
    _mm512_stream_si512(static_cast<__m512i*>(p), (__m512i)v);
#endif
  } else if constexpr (sizeof(V) == 32) {
    _mm256_stream_si256(static_cast<__m256i*>(p), (__m256i)v);
  } else {
    _mm_stream_si128(static_cast<__m128i*>(p), (__m128i)v);
  }
}
#endif

// Past the caches, to memory: saves reading the old contents of lines that are overwritten whole.
// p must be aligned to a register, which may be half a Pair.
template <typename T>
inline void stream(T* p, Pair<Acc<T>> v) {
#if defined(__AVX2__)
  if constexpr (std::is_same_v<T, BFloat16>) {
    stream_register(p, encode(v, T()));
  } else if constexpr (std::is_same_v<T, Half>) {
    stream_register(p, narrow(v.first));
    stream_register(p + kLanes<float>, narrow(v.second));
  } else {
    stream_register(p, v.first);
    stream_register(p + kLanes<T>, v.second);
  }
#else
  store(p, v);
#endif
}

// Makes streamed stores visible before what this thread stores next: call it at the end of a task.
inline void end_stream() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// A Pair in the order of memory, whatever T: for arrays of different types side by side.
template <typename T>
inline Pair<Acc<T>> load_in_order(const T* p, All = {}) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const auto widened = [](const T* from) {
      return bits_as<FloatVec>(__builtin_convertvector(load_as<HalfBits>(from), Bits) << 16);
    };
    return {widened(p), widened(p + kLanes<float>)};
  } else {
    return load(p);
  }
}

// The bfloat16 values in the upper halves of two registers.
inline void store_upper_halves(BFloat16* p, Bits first, Bits second) {
  const HalfBits low = __builtin_convertvector(first >> 16, HalfBits);
  const HalfBits high = __builtin_convertvector(second >> 16, HalfBits);
  std::memcpy(p, &low, sizeof(low));
  std::memcpy(p + kLanes<float>, &high, sizeof(high));
}

template <typename T>
inline void store_in_order(T* p, Pair<Acc<T>> v, All = {}) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    store_upper_halves(p, round_to_bfloat16(v.first), round_to_bfloat16(v.second));
  } else {
    store(p, v);
  }
}

template <typename T>
inline Pair<Acc<T>> load_in_order(const T* p, First first) {
  alignas(MC_REGISTER_BYTES) unsigned char part[sizeof(T) * kStep<T>] = {};
  std::memcpy(part, p, sizeof(T) * first.count);
  return load_in_order(reinterpret_cast<const T*>(part));
}

template <typename T>
inline void store_in_order(T* p, Pair<Acc<T>> v, First first) {
  alignas(MC_REGISTER_BYTES) unsigned char part[sizeof(T) * kStep<T>];
  store_in_order(reinterpret_cast<T*>(part), v);
  std::memcpy(p, part, sizeof(T) * first.count);
}

// One register of bytes as 32-bit integers.
inline Bits widen_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Bits)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (Bits)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  Bits v;
  for (int64_t i = 0; i < kLanes<float>; ++i) v[i] = p[i];
  return v;
#endif
}

inline SignedBits widen_signed_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (SignedBits)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (SignedBits)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  SignedBits v;
  for (int64_t i = 0; i < kLanes<float>; ++i) v[i] = static_cast<int8_t>(p[i]);
  return v;
#endif
}

// Two registers of 32-bit integers as bytes, kept within 0 to 255, or within -128 to 127. They must
// be within 16 bits.
template <bool kSigned>
inline void store_as_bytes(uint8_t* p, Bits first, Bits second) {
#if defined(__AVX512F__)
  const auto narrow = [](Bits v) {
    if constexpr (kSigned) return _mm512_cvtsepi32_epi8((__m512i)v);
    return _mm512_cvtusepi32_epi8(_mm512_max_epi32((__m512i)v, _mm512_setzero_si512()));
  };
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(first));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p) + 1, narrow(second));
#elif defined(__AVX2__)
  const __m256i halves = _mm256_packs_epi32((__m256i)first, (__m256i)second);
  const __m256i words = _mm256_permute4x64_epi64(halves, 0xd8);
  const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   kSigned ? _mm_packs_epi16(low, high) : _mm_packus_epi16(low, high));
#else
  const int32_t least = kSigned ? -128 : 0, most = kSigned ? 127 : 255;
  for (int64_t i = 0; i < 2 * kLanes<float>; ++i) {
    const int32_t v =
        static_cast<int32_t>(i < kLanes<float> ? first[i] : second[i - kLanes<float>]);
    p[i] = static_cast<uint8_t>(v < least ? least : v > most ? most : v);
  }
#endif
}

inline FloatVec square_root(FloatVec v) {
#if defined(__AVX512F__)
  return (FloatVec)_mm512_sqrt_ps((__m512)v);
#elif defined(__AVX2__)
  return (FloatVec)_mm256_sqrt_ps((__m256)v);
#elif defined(__aarch64__)
  return (FloatVec)vsqrtq_f32((float32x4_t)v);
#else
  for (int64_t i = 0; i < kLanes<float>; ++i) v[i] = __builtin_sqrtf(v[i]);
  return v;
#endif
}

inline DoubleVec square_root(DoubleVec v) {
#if defined(__AVX512F__)
  return (DoubleVec)_mm512_sqrt_pd((__m512d)v);
#elif defined(__AVX2__)
  return (DoubleVec)_mm256_sqrt_pd((__m256d)v);
#elif defined(__aarch64__)
  return (DoubleVec)vsqrtq_f64((float64x2_t)v);
#else
  for (int64_t i = 0; i < kLanes<double>; ++i) v[i] = __builtin_sqrt(v[i]);
  return v;
#endif
}

// Calls body(i, All{}) for each whole Pair of a row of n, then body(i, First{rest}).
template <typename T, typename Body>
inline void for_each_pair(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kStep<T> <= n; i += kStep<T>) body(i, All{});
  if (i < n) body(i, First{n - i});
}

// Sum over a row of n of term(i, elements), in an order that depends on n alone.
template <typename T, typename Term>
inline Acc<T> sum_over(int64_t n, Term term) {
  // Two pairs: four chains hide the latency of an addition.
  Pair<Acc<T>> even = {}, odd = {};
  int64_t i = 0;
  for (; i + 2 * kStep<T> <= n; i += 2 * kStep<T>) {
    even += term(i, All{});
    odd += term(i + kStep<T>, All{});
  }
  for_each_pair<T>(n - i, [&](int64_t j, auto elements) { even += term(i + j, elements); });
  const Pair<Acc<T>> both = even + odd;
  const auto lanes = both.first + both.second;
  Acc<T> total = 0;
  for (int64_t lane = 0; lane < kLanes<Acc<T>>; ++lane) total += lanes[lane];
  return total;
}

}  // namespace metalcore::simd
