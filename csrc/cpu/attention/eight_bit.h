// SPDX-License-Identifier: MIT
// Keys and values of 8 bits: integers, or codes of float8_e4m3fn; those of 16 bits beside queries
// of 32; and how any storage is read.
#pragma once

#include "../common/product.h"

namespace metalcore::cpu::tiles {

struct Int8 {
  int8_t value;

  explicit operator float() const { return value; }
};

// Sign, 4 bits of exponent, 3 of fraction; without infinities, and 0x7f is NaN.
struct Float8 {
  uint8_t code;

  explicit operator float() const {
    const uint32_t bits = uint32_t(code & 0x7f) << 20 | uint32_t(code & 0x80) << 24;
    return (code & 0x7f) == 0x7f ? std::numeric_limits<float>::quiet_NaN()
                                 : simd::bits_as<float>(bits) * 0x1p120f;
  }
};

// Half precision, beside queries in float.
template <typename H>
struct Narrow {
  H value;

  explicit operator float() const { return float(value); }
};

// Whether rows are widened in the order of memory.
template <typename S>
constexpr bool kIsCode =
    std::is_same_v<S, Int8> || std::is_same_v<S, Float8> || std::is_same_v<S, Narrow<simd::Half>> ||
    std::is_same_v<S, Narrow<simd::BFloat16>>;

inline simd::FloatVec widen_codes(const Int8* p) {
  const auto raw = simd::widen_signed_bytes(reinterpret_cast<const uint8_t*>(p));
  return __builtin_convertvector(raw, simd::FloatVec);
}

inline simd::FloatVec widen_codes(const Float8* p) {
  using simd::Bits;
  const Bits raw = simd::widen_bytes(reinterpret_cast<const uint8_t*>(p));
  const Bits size = raw & 0x7f;
  const auto x = simd::bits_as<simd::FloatVec>(size << 20 | (raw & 0x80) << 24) * 0x1p120f;
  return simd::bits_as<simd::FloatVec>(simd::bits_as<Bits>(x) | Bits(size == 0x7f));
}

inline simd::FloatVec widen_codes(const Narrow<simd::Half>* p) {
  return simd::widen(simd::load_as<simd::HalfBits>(p));
}

inline simd::FloatVec widen_codes(const Narrow<simd::BFloat16>* p) {
  const auto raw = __builtin_convertvector(simd::load_as<simd::HalfBits>(p), simd::Bits);
  return simd::bits_as<simd::FloatVec>(raw << 16);
}

// The next elements of a row of S for sums of A. Codes are in the order of memory, the rest in
// that of its Pairs.
template <typename A, typename S>
inline simd::Pair<A> load_stored(const S* p, simd::All = {}) {
  if constexpr (!kIsCode<S>) {
    return simd::load(p);
  } else if constexpr (std::is_same_v<A, float>) {
    return {widen_codes(p), widen_codes(p + simd::kLanes<float>)};
  } else {
    simd::Pair<A> x;
    for (int64_t i = 0; i < simd::kLanes<A>; ++i) {
      x.first[i] = A(float(p[i]));
      x.second[i] = A(float(p[simd::kLanes<A> + i]));
    }
    return x;
  }
}

template <typename A, typename S>
inline simd::Pair<A> load_stored(const S* p, simd::First first) {
  if constexpr (!kIsCode<S>) {
    return simd::load(p, first);
  } else {
    S part[2 * simd::kLanes<A>] = {};
    std::memcpy(static_cast<void*>(part), p, first.count * sizeof(S));
    return load_stored<A>(part);
  }
}

// A row of T in the order in which rows of S are loaded, and the way back.
template <typename S, typename T, typename Elements>
inline simd::Pair<simd::Acc<T>> load_beside(const T* p, Elements elements) {
  if constexpr (kIsCode<S>)
    return simd::load_in_order(p, elements);
  else
    return simd::load(p, elements);
}

template <typename S, typename T, typename Elements>
inline void store_beside(T* p, simd::Pair<simd::Acc<T>> v, Elements elements) {
  if constexpr (kIsCode<S>)
    simd::store_in_order(p, v, elements);
  else
    simd::store(p, v, elements);
}

}  // namespace metalcore::cpu::tiles
