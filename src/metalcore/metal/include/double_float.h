// SPDX-License-Identifier: MIT
// Arithmetic of unevaluated sums of two floats, as numbers of 48 bits: what is rounded once in
// float64 has an error of a few 2^-48 here. A number that is not finite has a low part of zero.
#pragma once

#include "float_pairs.h"

inline bool is_plain(float x) { return isfinite(x) && x != 0.0f; }

// x + y, also where the high parts cancel.
inline two_floats pair_sum(two_floats x, two_floats y) {
  const two_floats high = two_sum(x.high, y.high);
  const two_floats low = two_sum(x.low, y.low);
  const two_floats sum = quick_two_sum(high.high, high.low + low.high);
  return quick_two_sum(sum.high, sum.low + low.low);
}

inline two_floats negative(two_floats x) { return {-x.high, -x.low}; }

inline two_floats pair_product(two_floats x, two_floats y) {
  const two_floats product = two_product(x.high, y.high);
  const float low = fma(x.high, y.low, fma(x.low, y.high, product.low));
  return quick_two_sum(product.high, low);
}

inline two_floats pair_quotient(two_floats x, two_floats y) {
  const float first = x.high / y.high;
  const two_floats rest = pair_sum(x, negative(pair_product({first, 0.0f}, y)));
  return quick_two_sum(first, rest.high / y.high);
}

// Sums of three floats, for what is left where large numbers cancel: 72 bits.
struct three_floats {
  float first;
  float second;
  float third;
};

inline three_floats with_products(three_floats sum, two_floats x, two_floats y) {
  const two_floats high = two_product(x.high, y.high);
  const two_floats left = two_product(x.high, y.low);
  const two_floats right = two_product(x.low, y.high);
  const two_floats first = two_sum(sum.first, high.high);
  const two_floats cross = two_sum(left.high, right.high);
  const two_floats carried = two_sum(first.low, high.low);
  const two_floats both = two_sum(carried.high, cross.high);
  const two_floats second = two_sum(sum.second, both.high);
  const float small = (left.low + right.low) + fma(x.low, y.low, cross.low);
  return {first.high, second.high, sum.third + (small + (carried.low + both.low + second.low))};
}

inline two_floats rounded(three_floats x) {
  if (!isfinite(x.first) || !isfinite(x.second)) {
    return {x.first, 0.0f};
  }
  const two_floats first = two_sum(x.first, x.second);
  const two_floats second = two_sum(first.low, x.third);
  const two_floats sum = quick_two_sum(first.high, second.high);
  return quick_two_sum(sum.high, sum.low + second.low);
}

// log 2: two parts whose products with a small whole number are exact, and the rest.
constant float LOG_2_HIGH = 0x1.62e4p-1f;
constant float LOG_2_MIDDLE = 0x1.7f7cp-20f;
constant float LOG_2_LOW = 0x1.1cf79ap-36f;

inline two_floats multiple_of_log_2(int k) {
  const float times = float(k);
  const two_floats high = two_sum(times * LOG_2_HIGH, times * LOG_2_MIDDLE);
  return pair_sum(high, {times * LOG_2_LOW, 0.0f});
}

// 1 / n! for n from 2 to 7, and from there on as floats.
constant float2 INVERSE_FACTORIALS[6] = {
    {0.5f, 0.0f},
    {0x1.555556p-3f, -0x1.555556p-28f},
    {0x1.555556p-5f, -0x1.555556p-30f},
    {0x1.111112p-7f, -0x1.dddddep-32f},
    {0x1.6c16c2p-10f, -0x1.27d27ep-35f},
    {0x1.a01a02p-13f, -0x1.7f97fap-39f}};
constant float LATER_INVERSE_FACTORIALS[6] = {0x1.a01a02p-16f, 0x1.71de3ap-19f, 0x1.27e4fcp-22f,
                                              0x1.ae6456p-26f, 0x1.1eed8ep-29f, 0x1.612462p-33f};

// 2^k e^r with |r| <= log(2) / 2, by the series of e^r: its late terms are below the low parts.
inline two_floats pair_exp(two_floats x) {
  const int k = int(rint(x.high * 1.44269504f));
  const two_floats r = pair_sum(x, negative(multiple_of_log_2(k)));
  float late = LATER_INVERSE_FACTORIALS[5];
  for (int n = 4; n >= 0; --n) {
    late = fma(late, r.high, LATER_INVERSE_FACTORIALS[n]);
  }
  two_floats sum = {late, 0.0f};
  for (int n = 5; n >= 0; --n) {
    const float2 next = INVERSE_FACTORIALS[n];
    sum = pair_sum(pair_product(sum, r), {next.x, next.y});
  }
  sum = pair_sum(pair_product(sum, r), {1.0f, 0.0f});
  sum = pair_sum(pair_product(sum, r), {1.0f, 0.0f});
  return {ldexp(sum.high, k), ldexp(sum.low, k)};
}

// 2 / n for n = 3, 5, 7, 9, and from there on as floats.
constant float2 LOG_TERMS[4] = {
    {0x1.555556p-1f, -0x1.555556p-26f},
    {0x1.99999ap-2f, -0x1.99999ap-28f},
    {0x1.24924ap-2f, -0x1.b6db6ep-27f},
    {0x1.c71c72p-3f, -0x1.c71c72p-30f}};
constant float LATER_LOG_TERMS[6] = {0x1.745d18p-3f, 0x1.3b13b2p-3f, 0x1.111112p-3f,
                                     0x1.e1e1e2p-4f, 0x1.af286cp-4f, 0x1.861862p-4f};

// k log 2 + 2 artanh(s), s = (m - 1) / (m + 1), for x = 2^k m with m around 1.
inline two_floats pair_log(two_floats x) {
  int k;
  const float fraction = frexp(x.high, k);
  k -= fraction < 0.70710678f ? 1 : 0;
  const two_floats m = {ldexp(x.high, -k), ldexp(x.low, -k)};
  const two_floats s = pair_quotient(pair_sum(m, {-1.0f, 0.0f}), pair_sum(m, {1.0f, 0.0f}));
  const two_floats square = pair_product(s, s);
  float late = LATER_LOG_TERMS[5];
  for (int n = 4; n >= 0; --n) {
    late = fma(late, square.high, LATER_LOG_TERMS[n]);
  }
  two_floats sum = {late, 0.0f};
  for (int n = 3; n >= 0; --n) {
    const float2 next = LOG_TERMS[n];
    sum = pair_sum(pair_product(sum, square), {next.x, next.y});
  }
  sum = pair_sum(pair_product(sum, square), {2.0f, 0.0f});
  return pair_sum(pair_product(sum, s), multiple_of_log_2(k));
}
