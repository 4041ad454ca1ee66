// SPDX-License-Identifier: MIT
// The sum of a threadgroup's slice of a row, and of all slices of one.
#pragma once

#include "limbs.h"
#include "pair_sums.h"

// The sum over a threadgroup, for its first thread; `scratch` holds 64 floats. One barrier.
inline two_floats threadgroup_pair_sum(
    two_floats own, threadgroup float* scratch, uint lane, uint lanes) {
  for (ushort d = 16; d > 0; d /= 2) {
    const two_floats other = {simd_shuffle_xor(own.high, d), simd_shuffle_xor(own.low, d)};
    own = with_pair(own, other);
  }
  if (lanes > 32) {
    if (lane % 32 == 0) {
      scratch[lane / 32] = own.high;
      scratch[lane / 32 + 32] = own.low;
    }
    // every simdgroup's sum is in scratch
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane == 0) {
      for (uint s = 1; s < lanes / 32; ++s) {
        own = with_pair(own, {scratch[s], scratch[s + 32]});
      }
    }
  }
  return own;
}

// The limbs and counts of a threadgroup's terms, of which each thread has written its share.
template <bool PRODUCTS>
inline void write_limbs(threadgroup int* limbs, device int* part, uint lane, uint lanes) {
  // all threads have added their terms
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane < uint(fixed_point<PRODUCTS>::ROWS)) {
    int total = 0;
    for (uint i = 0; i < lanes; ++i) {
      total += limbs[lane * lanes + i];
    }
    part[lane] = total;
  }
}

constant constexpr int EXTRA = 4;

// The sum of the limbs of all slices of a row, for the first thread: after EXTRA digits of zero.
template <bool PRODUCTS>
inline limbs_of_thread merged(
    device const int* parts,
    uint slices,
    threadgroup long* totals,
    threadgroup int* limbs,
    uint lane) {
  typedef fixed_point<PRODUCTS> format;
  if (lane < uint(format::ROWS)) {
    long total = 0;
    for (uint s = 0; s < slices; ++s) {
      total += parts[s * format::ROWS + lane];
    }
    totals[lane] = total;
  }
  // the totals of all limbs are there
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const limbs_of_thread found = {limbs + EXTRA, 1};
  if (lane == 0) {
    long up = 0;
    for (int i = 0; i < format::LIMBS; ++i) {
      const long all = totals[i] + up;
      limbs[EXTRA + i] = int(i < format::LIMBS - 1 ? all & 0xffff : all);
      up = all >> 16;
    }
    for (int i = 0; i < EXTRA; ++i) {
      limbs[i] = 0;
      limbs[EXTRA + format::LIMBS + i] = totals[format::LIMBS + i] != 0 ? 1 : 0;
    }
  }
  return found;
}

// The nearest T to the size of `found` over n.
template <typename T>
inline T quotient(magnitude found, threadgroup int* digits, int lowest, ulong n) {
  ulong rest = 0;
  const int limbs = found.limbs;
  // one after the other: each division is a page of code
#pragma clang loop unroll(disable)
  for (int i = limbs - 1; i >= -EXTRA; --i) {
    rest = rest << 16 | found.digit(i);
    // mslsim: allow(division64): one thread for each row
    digits[EXTRA + i] = int(rest / n);
    rest -= ulong(digits[EXTRA + i]) * n;
  }
  const magnitude size = magnitude_of({digits, 1}, limbs + EXTRA);
  return size.number<T>(lowest - 16 * EXTRA, rest != 0, found.is_negative);
}
