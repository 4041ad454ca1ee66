// SPDX-License-Identifier: MIT
// A sum in fixed point, wide enough for every term: nothing is lost until it is rounded, once.
//
// Limb i counts 2^(32 i + kLowest) in an int64, of which 32 bits are payload: 2^31 terms fit before
// carries must move. Limbs reach from the last bit of the smallest product of two doubles to 2^64
// times the largest one.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "../common/simd.h"

namespace metalcore::precise {

__extension__ typedef unsigned __int128 Wide;

constexpr int kLowest = -2176;
constexpr int kLimbs = 134;

// The finite double |x| = mantissa 2^exponent.
struct Parts {
  uint64_t mantissa;
  int exponent;
  bool is_negative, is_finite;
};

inline Parts parts_of(double x) {
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  const int exponent = static_cast<int>(bits >> 52 & 0x7ff);
  const uint64_t fraction = bits & ((uint64_t(1) << 52) - 1);
  return {exponent ? fraction | uint64_t(1) << 52 : fraction, (exponent ? exponent : 1) - 1075,
          (bits >> 63) != 0, exponent != 0x7ff};
}

// Bits of the fraction, and the exponent of the smallest number above zero.
template <typename T>
constexpr int kDigits = std::is_same_v<T, double>       ? 53
                        : std::is_same_v<T, float>      ? 24
                        : std::is_same_v<T, simd::Half> ? 11
                                                        : 8;
template <typename T>
constexpr int kLeast = std::is_same_v<T, double>       ? -1074
                       : std::is_same_v<T, float>      ? -149
                       : std::is_same_v<T, simd::Half> ? -24
                                                       : -133;

// mantissa 2^exponent to the nearest T, ties to even; `more` says that a little is missing above
// it. The first bit of the mantissa is set.
template <typename T>
T rounded(uint64_t mantissa, int exponent, bool more, bool is_negative) {
  const int drop = std::max(64 - kDigits<T>, kLeast<T> - exponent);
  uint64_t kept = 0;
  if (drop <= 64) {
    const uint64_t last = drop < 64 ? mantissa << (64 - drop) : mantissa;
    kept = drop < 64 ? mantissa >> drop : 0;
    const uint64_t half = uint64_t(1) << 63;
    kept += last > half || (last == half && (more || kept % 2)) ? 1 : 0;
  }
  const double size = std::ldexp(static_cast<double>(kept), exponent + drop);
  return static_cast<T>(static_cast<simd::Acc<T>>(is_negative ? -size : size));
}

// The size of a sum, by digits of 32 bits, the last of them 2^-128 of the last limb: room for the
// digits of a quotient.
class Magnitude {
 public:
  static constexpr int kExtra = 4;
  static constexpr int kDigitCount = kLimbs + kExtra;
  static constexpr int kEnd = kLowest - 32 * kExtra;

  std::array<uint32_t, kDigitCount> digits{};
  // Whether there is something below the last digit.
  bool more = false;

  bool is_zero() const {
    for (const uint32_t digit : digits)
      if (digit) return false;
    return true;
  }

  // The place of the first bit, counted from the last digit's last one; there must be one.
  int first_bit() const {
    int i = kDigitCount - 1;
    while (!digits[i]) --i;
    return 32 * i + 31 - std::countl_zero(digits[i]);
  }

  // The 64 bits from `place` on upwards.
  uint64_t bits_from(int place) const {
    uint64_t bits = 0;
    for (int i = 0; i < 3; ++i) {
      const int at = (place >> 5) + i, shift = 32 * i - (place & 31);
      const uint64_t digit = at >= 0 && at < kDigitCount ? digits[at] : 0;
      bits |= shift < 0 ? digit >> -shift : shift < 64 ? digit << shift : 0;
    }
    return bits;
  }

  bool has_below(int place) const {
    if (more) return true;
    if (place <= 0) return false;
    for (int i = 0; i < place / 32; ++i)
      if (digits[i]) return true;
    return (digits[place / 32] & ((uint32_t(1) << place % 32) - 1)) != 0;
  }

  void divide(int64_t divisor) {
    Wide rest = 0;
    for (int i = kDigitCount - 1; i >= 0; --i) {
      rest = rest << 32 | digits[i];
      digits[i] = static_cast<uint32_t>(rest / static_cast<uint64_t>(divisor));
      rest %= static_cast<uint64_t>(divisor);
    }
    more = rest != 0;
  }

  template <typename T>
  T to(bool is_negative) const {
    const int place = first_bit() - 63;
    return rounded<T>(bits_from(place), place + kEnd, has_below(place), is_negative);
  }

  // The nearest T to the square root.
  template <typename T>
  T root() const {
    // an even exponent, and 126 or 127 bits: their root has 63 or 64
    const int place = (first_bit() - 125) & ~1;
    const Wide square = static_cast<Wide>(bits_from(place + 64)) << 64 | bits_from(place);
    uint64_t r = static_cast<uint64_t>(std::sqrt(static_cast<double>(square)));
    for (int step = 0; step < 2; ++step) r = static_cast<uint64_t>((r + square / r) / 2);
    while (static_cast<Wide>(r) * r > square) --r;
    while (static_cast<Wide>(r + 1) * (r + 1) <= square) ++r;
    const bool is_inexact = static_cast<Wide>(r) * r != square || has_below(place);
    const int shift = std::countl_zero(r);
    return rounded<T>(r << shift, (place + kEnd) / 2 - shift, is_inexact, false);
  }
};

class Exact {
 public:
  void add(double x) {
    const Parts p = parts_of(x);
    if (!p.is_finite) return add_special(x);
    put(p.mantissa, p.exponent, p.is_negative);
  }

  void add_product(double x, double y) {
    const Parts a = parts_of(x), b = parts_of(y);
    if (!a.is_finite || !b.is_finite) return add_special(x * y);
    put(static_cast<Wide>(a.mantissa) * b.mantissa, a.exponent + b.exponent,
        a.is_negative != b.is_negative);
  }

  void add(const Exact& other) {
    for (int i = other.first_; i <= other.last_; ++i) limbs_[i] += other.limbs_[i];
    include(other.first_, other.last_);
    terms_ += other.terms_ + 1;
    nans_ |= other.nans_;
    above_ |= other.above_;
    below_ |= other.below_;
    if (terms_ >= kMostTerms) carry();
  }

  template <typename T>
  T sum(bool all_negative_zero) const {
    return quotient<T>(1, all_negative_zero);
  }

  // The nearest T to the sum over a divisor above zero; of a sum of no terms but -0, that is -0.
  template <typename T>
  T quotient(int64_t divisor, bool all_negative_zero) const {
    if (is_special()) return special<T>();
    bool is_negative;
    Magnitude size = magnitude(is_negative);
    if (size.is_zero()) return static_cast<T>(all_negative_zero ? -0.0f : 0.0f);
    if (divisor != 1) size.divide(divisor);
    return size.to<T>(is_negative);
  }

  // The nearest T to the square root; NaN below zero.
  template <typename T>
  T root() const {
    if (is_special()) return static_cast<T>(std::sqrt(special<float>()));
    bool is_negative;
    const Magnitude size = magnitude(is_negative);
    if (size.is_zero()) return static_cast<T>(0.0f);
    return is_negative ? static_cast<T>(std::numeric_limits<float>::quiet_NaN()) : size.root<T>();
  }

  // Limbs of 32 bits but for the last one in use, which has the sign.
  void carry() {
    int64_t up = 0;
    for (int i = first_; i <= std::min(last_, kLimbs - 2); ++i) {
      const int64_t all = limbs_[i] + up;
      limbs_[i] = all & 0xffffffff;
      up = all >> 32;
    }
    if (up) {
      last_ = std::min(last_ + 1, kLimbs - 1);
      limbs_[last_] += up;
    }
    terms_ = 1;
  }

  const std::array<int64_t, kLimbs>& limbs() const { return limbs_; }
  bool has_nan() const { return nans_; }
  bool has_above() const { return above_; }
  bool has_below() const { return below_; }

 private:
  static constexpr int64_t kMostTerms = int64_t(1) << 30;

  void put(Wide mantissa, int exponent, bool is_negative) {
    const int place = exponent - kLowest, limb = place >> 5, shift = place & 31;
    const uint64_t low = static_cast<uint64_t>(mantissa << shift);
    const uint64_t high = static_cast<uint64_t>(mantissa << shift >> 64);
    const uint64_t over = shift ? static_cast<uint64_t>(mantissa >> (128 - shift)) : 0;
    const int64_t sign = is_negative ? -1 : 1;
    limbs_[limb] += sign * static_cast<int64_t>(low & 0xffffffff);
    limbs_[limb + 1] += sign * static_cast<int64_t>(low >> 32);
    limbs_[limb + 2] += sign * static_cast<int64_t>(high & 0xffffffff);
    if (high >> 32 || over) {
      limbs_[limb + 3] += sign * static_cast<int64_t>(high >> 32);
      limbs_[limb + 4] += sign * static_cast<int64_t>(over);
      include(limb, limb + 4);
    } else {
      include(limb, limb + 2);
    }
    if (++terms_ >= kMostTerms) carry();
  }

  void include(int first, int last) {
    first_ = std::min(first_, first);
    last_ = std::max(last_, last);
  }

  void add_special(double x) {
    nans_ |= std::isnan(x);
    above_ |= x > 0;
    below_ |= x < 0;
  }

  bool is_special() const { return nans_ || above_ || below_; }

  template <typename T>
  T special() const {
    const float infinity = std::numeric_limits<float>::infinity();
    if (nans_ || (above_ && below_)) return static_cast<T>(std::numeric_limits<float>::quiet_NaN());
    return static_cast<T>(above_ ? infinity : -infinity);
  }

  Magnitude magnitude(bool& is_negative) const {
    Exact all = *this;
    all.carry();
    is_negative = all.limbs_[all.last_] < 0;
    if (is_negative) {
      for (int i = all.first_; i <= all.last_; ++i) all.limbs_[i] = -all.limbs_[i];
      all.carry();
    }
    Magnitude size;
    for (int i = all.first_; i <= all.last_; ++i)
      size.digits[i + Magnitude::kExtra] = static_cast<uint32_t>(all.limbs_[i]);
    return size;
  }

  std::array<int64_t, kLimbs> limbs_{};
  int first_ = kLimbs - 1, last_ = 0;
  int64_t terms_ = 0;
  bool nans_ = false, above_ = false, below_ = false;
};

}  // namespace metalcore::precise
