// SPDX-License-Identifier: MIT
// Exact sums of floats, or of products of two, in fixed point.
//
// Limb i counts 2^(16 i + lowest) in an int, of which 16 bits are payload: a thread adds up
// MOST_TERMS terms before it moves the carries. Each thread has limbs of its own in threadgroup
// memory, `stride` apart, and after them four counts: of NaN, of infinity, of its negative, and of
// terms other than -0. Sums of integers are the same in any order.
#pragma once

#include <metal_stdlib>
using namespace metal;

constant constexpr uint MOST_TERMS = 16384;
constant constexpr int COUNTS = 4;

// For sums, and for sums of products: from the last bit of the least term to 2^32 of the largest.
template <bool PRODUCTS>
struct fixed_point {
  static constant constexpr int LIMBS = PRODUCTS ? 38 : 20;
  static constant constexpr int LOWEST = PRODUCTS ? -304 : -160;
  static constant constexpr int ROWS = LIMBS + COUNTS;
};

// As float32 has it, without arithmetic: that may flush subnormal numbers.
inline uint bits_of(float x) { return as_type<uint>(x); }
inline uint bits_of(half x) { return as_type<uint>(float(x)); }
inline uint bits_of(bfloat x) { return uint(as_type<ushort>(x)) << 16; }

// |x| = mantissa 2^(exponent - 150)
struct parts {
  uint mantissa;
  int exponent;

  bool is_special() const thread { return exponent == 255; }
};

inline parts parts_of(uint bits) {
  const uint exponent = bits >> 23 & 0xff;
  const uint fraction = bits & 0x7fffff;
  return {exponent == 0 ? fraction : fraction | 0x800000, int(max(exponent, 1u))};
}

struct limbs_of_thread {
  threadgroup int* at;
  uint stride;

  void add(int row, int value) const thread { at[row * stride] += value; }
  int get(int row) const thread { return at[row * stride]; }

  void clear(int rows) const thread {
    for (int i = 0; i < rows; ++i) {
      at[i * stride] = 0;
    }
  }

  // Digits of 16 bits but for the last one, which has the sign.
  void carry(int limbs) const thread {
    int up = 0;
    for (int i = 0; i < limbs - 1; ++i) {
      const int all = at[i * stride] + up;
      at[i * stride] = all & 0xffff;
      up = all >> 16;
    }
    at[(limbs - 1) * stride] += up;
  }

  void add_special(int limbs, bool is_nan, bool is_negative) const thread {
    add(is_nan ? limbs : is_negative ? limbs + 2 : limbs + 1, 1);
  }

  void add_term(uint bits) const thread {
    typedef fixed_point<false> format;
    const parts p = parts_of(bits);
    add(format::LIMBS + 3, bits == 0x80000000 ? 0 : 1);
    if (p.is_special()) {
      add_special(format::LIMBS, (bits & 0x7fffff) != 0, bits >> 31 != 0);
      return;
    }
    const int place = p.exponent - 150 - format::LOWEST;
    const int limb = place >> 4;
    const uint shift = place & 15;
    const uint low = p.mantissa << shift;
    const uint high = shift == 0 ? 0 : p.mantissa >> (32 - shift);
    const int sign = bits >> 31 != 0 ? -1 : 1;
    add(limb, sign * int(low & 0xffff));
    add(limb + 1, sign * int(low >> 16));
    add(limb + 2, sign * int(high));
  }

  void add_product(uint x, uint y) const thread {
    typedef fixed_point<true> format;
    const parts p = parts_of(x);
    const parts q = parts_of(y);
    const bool is_negative = (x ^ y) >> 31 != 0;
    if (p.is_special() || q.is_special()) {
      const bool has_nan =
          (p.is_special() && (x & 0x7fffff) != 0) || (q.is_special() && (y & 0x7fffff) != 0);
      const bool has_zero = p.mantissa == 0 || q.mantissa == 0;
      add_special(format::LIMBS, has_nan || has_zero, is_negative);
      return;
    }
    const int place = p.exponent + q.exponent - 300 - format::LOWEST;
    const int limb = place >> 4;
    const uint shift = place & 15;
    const uint low = p.mantissa * q.mantissa;
    const uint high = mulhi(p.mantissa, q.mantissa);
    const uint first = low << shift;
    const uint second = high << shift | (shift == 0 ? 0 : low >> (32 - shift));
    const int sign = is_negative ? -1 : 1;
    add(limb, sign * int(first & 0xffff));
    add(limb + 1, sign * int(first >> 16));
    add(limb + 2, sign * int(second & 0xffff));
    add(limb + 3, sign * int(second >> 16));
  }
};

// Bits of the fraction after the first one, and the exponent of the least number above zero.
template <typename T>
struct format_of {
  static constant constexpr int FRACTION = 23;
  static constant constexpr int LEAST = -149;
  static float number(uint bits) { return as_type<float>(bits); }
};
template <>
struct format_of<half> {
  static constant constexpr int FRACTION = 10;
  static constant constexpr int LEAST = -24;
  static half number(uint bits) { return as_type<half>(ushort(bits)); }
};
template <>
struct format_of<bfloat> {
  static constant constexpr int FRACTION = 7;
  static constant constexpr int LEAST = -133;
  static bfloat number(uint bits) { return as_type<bfloat>(ushort(bits)); }
};

// mantissa 2^exponent to the nearest T, ties to even; `more` says that a little is missing above
// it. The first bit of the mantissa is set.
template <typename T>
inline T rounded(ulong mantissa, int exponent, bool more, bool is_negative) {
  typedef format_of<T> format;
  constexpr int EXPONENTS = 8 * sizeof(T) - 1 - format::FRACTION;
  constexpr uint INFINITE = (1u << EXPONENTS) - 1;
  const int drop = max(63 - format::FRACTION, format::LEAST - exponent);
  uint kept = 0;
  if (drop <= 64) {
    const ulong last = drop < 64 ? mantissa << (64 - drop) : mantissa;
    const ulong middle = 1ul << 63;
    kept = drop < 64 ? uint(mantissa >> drop) : 0;
    kept += last > middle || (last == middle && (more || kept % 2 == 1)) ? 1 : 0;
  }
  // the first bit of a mantissa adds one to the exponent
  const int above = exponent + drop - format::LEAST;
  const bool is_infinite = above >= int(INFINITE);
  const uint bits = is_infinite ? 0 : (uint(above) << format::FRACTION) + kept;
  const uint most = INFINITE << format::FRACTION;
  const uint sign = is_negative ? 1u << (8 * sizeof(T) - 1) : 0;
  return format::number((is_infinite || bits > most ? most : bits) | sign);
}

template <typename T>
inline T zero(bool is_negative) {
  return format_of<T>::number(is_negative ? 1u << (8 * sizeof(T) - 1) : 0);
}

template <typename T>
inline T not_a_number() {
  typedef format_of<T> format;
  const uint sign = 1u << (8 * sizeof(T) - 1);
  return format::number((sign - 1) & ~((1u << (format::FRACTION - 1)) - 1));
}

// A sum after its carries, by the 16-bit digits of its size. Digits below `least` are zero.
struct magnitude {
  limbs_of_thread of;
  int limbs;
  int least;
  bool is_negative;

  uint digit(int i) const thread {
    if (i < 0 || i >= limbs) {
      return 0;
    }
    const uint own = uint(of.get(i)) & 0xffff;
    if (!is_negative) {
      return own;
    }
    return i < least ? 0 : i == least ? 0x10000 - own : 0xffff - own;
  }

  bool is_zero() const thread { return least == limbs; }

  int first_bit() const thread {
    int i = limbs - 1;
    while (digit(i) == 0) {
      --i;
    }
    return 16 * i + 31 - int(clz(digit(i)));
  }

  ulong bits_from(int place) const thread {
    ulong bits = 0;
    for (int i = 0; i < 5; ++i) {
      const int shift = 16 * i - (place & 15);
      const ulong own = digit((place >> 4) + i);
      bits |= shift < 0 ? own >> -shift : shift < 64 ? own << shift : 0;
    }
    return bits;
  }

  bool has_below(int place) const thread {
    return place > 16 * least &&
           (place >= 16 * (least + 1) || (digit(least) & ((1u << (place & 15)) - 1)) != 0);
  }

  template <typename T>
  T number(int lowest, bool more, bool sign) const thread {
    const int place = first_bit() - 63;
    return rounded<T>(bits_from(place), place + lowest, more || has_below(place), sign);
  }

  // The nearest T to the square root.
  template <typename T>
  T root(int lowest) const thread {
    // an even exponent, and 62 or 63 bits: their root has 31 or 32
    const int place = (first_bit() - 61) & ~1;
    const ulong square = bits_from(place);
    ulong r = 0;
    for (int bit = 31; bit >= 0; --bit) {
      const ulong next = r | 1ul << bit;
      r = next * next <= square ? next : r;
    }
    const bool more = r * r != square || has_below(place);
    const int shift = int(clz(r));
    return rounded<T>(r << shift, (place + lowest) / 2 - shift, more, false);
  }
};

inline magnitude magnitude_of(limbs_of_thread of, int limbs) {
  int least = 0;
  while (least < limbs && of.get(least) == 0) {
    ++least;
  }
  return {of, limbs, least, of.get(limbs - 1) < 0};
}

// NaN or an infinity, by the counts after the limbs.
inline bool is_special(limbs_of_thread of, int limbs) {
  return of.get(limbs) != 0 || of.get(limbs + 1) != 0 || of.get(limbs + 2) != 0;
}

template <typename T>
inline T special_number(limbs_of_thread of, int limbs) {
  typedef format_of<T> format;
  const uint sign = 1u << (8 * sizeof(T) - 1);
  const bool has_above = of.get(limbs + 1) != 0;
  const bool has_below = of.get(limbs + 2) != 0;
  if (of.get(limbs) != 0 || (has_above && has_below)) {
    return not_a_number<T>();
  }
  const uint infinity = sign - (1u << format::FRACTION);
  return format::number(has_above ? infinity : infinity | sign);
}

// A thread's share of terms i = lane, lane + lanes, ... below count, by add(limbs, i).
template <bool PRODUCTS, typename T>
inline void add_share(
    limbs_of_thread own, device const T* x, device const T* y, uint lane, uint lanes, uint count) {
  uint terms = 0;
  for (uint i = lane; i < count; i += lanes) {
    if (PRODUCTS) {
      own.add_product(bits_of(x[i]), bits_of(y[i]));
    } else {
      own.add_term(bits_of(x[i]));
    }
    if (++terms == MOST_TERMS) {
      own.carry(fixed_point<PRODUCTS>::LIMBS);
      terms = 0;
    }
  }
  own.carry(fixed_point<PRODUCTS>::LIMBS);
}
