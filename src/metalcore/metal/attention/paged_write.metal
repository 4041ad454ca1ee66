// SPDX-License-Identifier: MIT
// cache[slots[b][t]] = x[b, :, t]: new keys, or values, into the rows of a cache. Codes S of 8 bits
// are those nearest to x / scale, where scale = largest |x| / 127 (char), or / 448 (uchar, which
// holds float8_e4m3fn). A slot of -1 writes nothing.
//
// One simdgroup for each token of a head.

#include <metal_stdlib>
using namespace metal;

// The code nearest to x, ties to even.
template <typename S>
struct code;

template <>
struct code<char> {
  static constexpr constant float most = 127.0f;

  static char of(float x) { return char(rint(clamp(x, -127.0f, 127.0f))); }
};

template <>
struct code<uchar> {
  static constexpr constant float most = 448.0f;

  static uchar of(float x) {
    const uint bits = as_type<uint>(x);
    const uint sign = bits >> 24 & 0x80u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) {
      return uchar(sign | 0x7fu);
    }
    const float magnitude = min(as_type<float>(size), 448.0f);
    // below 2^-6, steps are 2^-9: an addition rounds to them
    if (magnitude < 0.015625f) {
      return uchar(sign | (as_type<uint>(magnitude + 16384.0f) & 0xffu));
    }
    const uint kept = as_type<uint>(magnitude);
    return uchar(sign | (((kept + 0x7ffffu + (kept >> 20 & 1u)) >> 20) - (120u << 3)));
  }
};

// Numbers stay as they are.
template <typename T>
struct code {
  static constexpr constant float most = 1.0f;

  static T of(float x) { return T(x); }
};

template <typename T, typename S, bool CODES, bool SCALE, int SIMDGROUPS>
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void paged_write(
    device const T* x [[buffer(0)]],
    device const int* slots [[buffer(1)]],
    device S* cache [[buffer(2)]],
    device float* scales [[buffer(3)]],
    constant long* size [[buffer(4)]],
    constant long* stride [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint heads = uint(size[0]), tokens = uint(size[1]), width = uint(size[2]);
  const uint entries = uint(size[3]), page = uint(size[4]), pages = uint(size[5]);
  const uint row = group * SIMDGROUPS + simdgroup;
  if (row >= entries * tokens * heads) {
    return;
  }
  const uint token = row / heads, head = row % heads;
  const int slot = slots[token];
  if (slot < 0 || uint(slot) >= page * pages) {
    return;
  }
  const uint at = uint(slot) / page, line = uint(slot) % page;
  x += (token / tokens) * ulong(stride[0]) + head * ulong(stride[1]) +
       (token % tokens) * ulong(stride[2]);
  cache += at * ulong(stride[3]) + line * ulong(stride[4]) + head * ulong(stride[5]);
  if (!CODES) {
    for (uint i = lane; i < width; i += 32) {
      cache[i] = S(x[i]);
    }
    return;
  }
  float scale = 1.0f;
  if (SCALE) {
    float largest = 0.0f;
    bool is_nan = false;
    for (uint i = lane; i < width; i += 32) {
      const float a = abs(float(x[i]));
      is_nan = is_nan || isnan(a);
      largest = max(largest, a);
    }
    scale = simd_any(is_nan) ? NAN : simd_max(largest) / code<S>::most;
    if (lane == 0) {
      scales[at * ulong(stride[6]) + line * ulong(stride[7]) + head * ulong(stride[8])] = scale;
    }
  }
  const bool is_plain = scale > 0.0f && isfinite(scale);
  for (uint i = lane; i < width; i += 32) {
    cache[i] = code<S>::of(is_plain ? float(x[i]) / scale : 0.0f);
  }
}
