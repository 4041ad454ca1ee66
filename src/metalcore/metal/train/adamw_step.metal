// SPDX-License-Identifier: MIT
// m = m + (1 - beta1) (g - m),  v = beta2 v + (1 - beta2) g^2
// p = decay p - step_size m / (sqrt(v) inverse_root + eps)
//
// Four tensors per launch, each read at one place and written at another, which may be the same. A
// threadgroup belongs to one tensor, each of its threads takes four values, so that a simdgroup has
// a block of 128: moments in 8 bits (S = uchar) are stored as described in
// ops/train/_eight_bit.py, block by block. WIDTH = 1 is for tensors that are not aligned to four
// values. With AMSGRAD or SCALED a launch has two tensors, and what tensor i needs beside stands in
// slot i + 2: its largest v in the place of v, its new gradient in the place of a new p.
// The norm: a sum of squares per threadgroup and run of values, then the root of their sum.

#include "reduce.h"

// The numbers of a step, and what values need to know of their place: the i-th of n that the
// threadgroup has, in a block of the tensor.
struct adamw {
  float decay, keep1, beta2, keep2, step_size, inverse_root, eps;
  uint seed;
  uint i;
  uint n;
  uint block;
};

template <int WIDTH, typename T>
inline float4 load4(device const T* x, uint i, uint n) {
  if (WIDTH == 4 && i + 4 <= n) {
    return float4(*(device const vec<T, 4>*)(x + i));
  }
  float4 v = float4(0.0f);
  for (int k = 0; k < 4; ++k) {
    if (i + k < n) {
      v[k] = float(x[i + k]);
    }
  }
  return v;
}

template <int WIDTH, typename T>
inline void store4(device T* x, uint i, uint n, float4 v) {
  if (WIDTH == 4 && i + 4 <= n) {
    *(device vec<T, 4>*)(x + i) = vec<T, 4>(v);
    return;
  }
  for (int k = 0; k < 4; ++k) {
    if (i + k < n) {
      x[i + k] = T(v[k]);
    }
  }
}

// As torch.maximum: a NaN on either side stays.
inline float4 larger(float4 a, float4 b) { return select(b, a, a > b || isnan(a)); }

// Updates the moments; returns what is taken from p.
template <bool AMSGRAD>
inline float4 update(
    thread const adamw& a, float4 g, thread float4& m, thread float4& v, thread float4& most) {
  m = m + (g - m) * a.keep1;
  v = v * a.beta2 + g * g * a.keep2;
  float4 divisor = v;
  if (AMSGRAD) {
    divisor = most = larger(most, v);
  }
  const float4 root = float4(
      precise::sqrt(divisor.x), precise::sqrt(divisor.y), precise::sqrt(divisor.z),
      precise::sqrt(divisor.w));
  return m * a.step_size / (root * a.inverse_root + a.eps);
}

inline uint hash(uint x) {
  x = (x ^ (x >> 16)) * 0x21f0aaadu;
  x = (x ^ (x >> 15)) * 0x735a2d97u;
  return x ^ (x >> 15);
}

// Random bits for the four values from a.i on.
inline uint4 noise(thread const adamw& a) {
  const uint place = a.i % 128;
  return hash(a.seed + a.block * 0x9e3779b9u) +
         uint4(place, place + 1, place + 2, place + 3) * 0x9e3779b1u;
}

// A moment as it is read, and where it is written to.
template <typename S>
struct moment {
  device const S* old;
  device S* next;
};

// Moments in float32.
template <int WIDTH, bool AMSGRAD>
inline float4 step(
    thread const adamw& a,
    float4 g,
    moment<float> m,
    moment<float> v,
    moment<float> most,
    uint lane) {
  float4 first = load4<WIDTH>(m.old, a.i, a.n);
  float4 second = load4<WIDTH>(v.old, a.i, a.n);
  float4 top = float4(0.0f);
  if (AMSGRAD) {
    top = load4<WIDTH>(most.old, a.i, a.n);
  }
  const float4 change = update<AMSGRAD>(a, g, first, second, top);
  store4<WIDTH>(m.next, a.i, a.n, first);
  store4<WIDTH>(v.next, a.i, a.n, second);
  if (AMSGRAD) {
    store4<WIDTH>(most.next, a.i, a.n, top);
  }
  return change;
}

// The block of a moment in 8 bits that a simdgroup works on. Its origin is read and written by one
// lane alone.
struct eight_bit {
  device const uchar* codes;
  device uchar* new_codes;
  uint origin;
  uint new_origin;
  uint largest;
  uint lane;

  eight_bit(moment<uchar> stored, uint block, uint lane, bool is_signed)
      : codes(stored.old + ulong(block) * 132),
        new_codes(stored.next + ulong(block) * 132),
        largest(is_signed ? 127 : 255),
        lane(lane) {
    uint read = 0;
    if (lane == 0) {
      read = *(device const uint*)(codes + 128);
    }
    origin = simd_broadcast(read, 0);
    new_origin = origin;
  }
  float bound() { return as_type<float>((largest + origin) << 20); }
  // From now on codes are stored for values up to this.
  void set_bound(float value) {
    const uint top = (as_type<uint>(value) + 0xfffffu) >> 20;
    new_origin = max(top, largest) - largest;
    if (lane == 0) {
      *(device uint*)(new_codes + 128) = new_origin;
    }
  }
  float4 get_signed() {
    const int4 code = int4(*(device const char4*)(codes + lane * 4));
    const uint4 bits = ((uint4(abs(code)) + origin) << 20) | (uint4(code) & 0x80000000u);
    return select(as_type<float4>(bits), float4(0.0f), code == 0);
  }
  float4 get() {
    const uint4 code = uint4(*(device const uchar4*)(codes + lane * 4));
    return as_type<float4>((code + origin) << 20);
  }
  void put_signed(float4 v, uint4 noise) {
    const uint4 bits = as_type<uint4>(v);
    int4 code = int4(((bits & 0x7fffffffu) + (noise & 0xfffffu)) >> 20) - int(new_origin);
    code = clamp(code, 0, 127);
    *(device char4*)(new_codes + lane * 4) = char4(select(code, -code, v < 0.0f));
  }
  void put(float4 v, uint4 noise) {
    const int4 code = int4((as_type<uint4>(v) + (noise >> 12)) >> 20) - int(new_origin);
    *(device uchar4*)(new_codes + lane * 4) = uchar4(clamp(code, 0, 255));
  }
};

// Moments in 8 bits. New codes are counted from the largest value that can come up.
template <int WIDTH, bool AMSGRAD>
inline float4 step(
    thread const adamw& a,
    float4 g,
    moment<uchar> m,
    moment<uchar> v,
    moment<uchar> most,
    uint lane) {
  const uint block = a.block;
  const uint4 bits = as_type<uint4>(g) & 0x7fffffffu;
  const float largest = as_type<float>(simd_max(max(max(bits.x, bits.y), max(bits.z, bits.w))));
  eight_bit first_block(m, block, lane, true);
  eight_bit second_block(v, block, lane, false);
  first_block.set_bound(first_block.bound() + (largest - first_block.bound()) * a.keep1);
  const float second_bound = second_block.bound() * a.beta2 + largest * largest * a.keep2;
  second_block.set_bound(second_bound);

  float4 first = first_block.get_signed();
  float4 second = second_block.get();
  float4 top = float4(0.0f);
  const uint4 chance = noise(a);
  if (AMSGRAD) {
    eight_bit top_block(most, block, lane, false);
    top_block.set_bound(max(top_block.bound(), second_bound));
    top = top_block.get();
    const float4 change = update<AMSGRAD>(a, g, first, second, top);
    top_block.put(top, chance);
    first_block.put_signed(first, chance);
    second_block.put(second, chance);
    return change;
  }
  const float4 change = update<AMSGRAD>(a, g, first, second, top);
  first_block.put_signed(first, chance);
  second_block.put(second, chance);
  return change;
}

// p rounded by chance to one of the two bfloat values around it.
inline float4 by_chance(thread const adamw& a, float4 p) {
  return as_type<float4>((as_type<uint4>(p) + (noise(a) & 0xffffu)) & 0xffff0000u);
}

#define PICK4(x) (slot == 0 ? x##0 : slot == 1 ? x##1 : slot == 2 ? x##2 : x##3)
#define PICK7(x) (slot < 4 ? PICK4(x) : slot == 4 ? x##4 : slot == 5 ? x##5 : x##6)
#define PICK_BESIDE(x) (slot == 0 ? x##2 : x##3)

template <
    typename T,
    typename S,
    int WIDTH,
    bool AMSGRAD,
    bool SCALED,
    bool CLIPPED,
    bool STOCHASTIC>
[[max_total_threads_per_threadgroup(512)]] kernel void adamw_step(
    device const T* p0 [[buffer(0)]],
    device const T* p1 [[buffer(1)]],
    device const T* p2 [[buffer(2)]],
    device const T* p3 [[buffer(3)]],
    device const T* g0 [[buffer(4)]],
    device const T* g1 [[buffer(5)]],
    device const T* g2 [[buffer(6)]],
    device const T* g3 [[buffer(7)]],
    device const S* m0 [[buffer(8)]],
    device const S* m1 [[buffer(9)]],
    device const S* m2 [[buffer(10)]],
    device const S* m3 [[buffer(11)]],
    device const S* v0 [[buffer(12)]],
    device const S* v1 [[buffer(13)]],
    device const S* v2 [[buffer(14)]],
    device const S* v3 [[buffer(15)]],
    device T* new_p0 [[buffer(16)]],
    device T* new_p1 [[buffer(17)]],
    device T* new_p2 [[buffer(18)]],
    device T* new_p3 [[buffer(19)]],
    device S* new_m0 [[buffer(20)]],
    device S* new_m1 [[buffer(21)]],
    device S* new_m2 [[buffer(22)]],
    device S* new_m3 [[buffer(23)]],
    device S* new_v0 [[buffer(24)]],
    device S* new_v1 [[buffer(25)]],
    device S* new_v2 [[buffer(26)]],
    device S* new_v3 [[buffer(27)]],
    device const float* grad_norm [[buffer(28)]],
    constant float* numbers [[buffer(29)]],
    constant long* table [[buffer(30)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  // table: values, first threadgroup and seed of each slot; numbers: those of the step, then step
  // size and inverse root of each slot
  uint slot = 0;
  while (slot < 3 && group >= uint(table[4 + slot + 1])) {
    ++slot;
  }
  adamw a;
  a.decay = numbers[0];
  a.keep1 = numbers[1];
  a.beta2 = numbers[2];
  a.keep2 = numbers[3];
  a.eps = numbers[4];
  float factor = numbers[5];
  const float unscale = numbers[6];
  a.step_size = numbers[8 + slot];
  a.inverse_root = numbers[12 + slot];
  if (CLIPPED) {
    const float clip = numbers[7] / (grad_norm[0] * unscale + 1e-6f);
    factor *= clip > 1.0f ? 1.0f : clip;
  }
  const uint of_tensor = group - uint(table[4 + slot]);
  const ulong start = ulong(of_tensor) * (lanes * 4);
  a.n = uint(min(ulong(table[slot]) - start, ulong(lanes * 4)));
  a.seed = uint(table[8 + slot]);
  a.i = lane * 4;
  a.block = of_tensor * (lanes / 32) + lane / 32;
  // whole simdgroups leave: a block is shared by one
  if (a.i / 128 * 128 >= a.n) {
    return;
  }
  // moments in 8 bits are found by their block
  const ulong skipped = sizeof(S) == 1 ? 0 : start;
  const moment<S> m = {PICK4(m) + skipped, PICK4(new_m) + skipped};
  const moment<S> v = {PICK4(v) + skipped, PICK4(new_v) + skipped};
  const moment<S> most = {PICK_BESIDE(v) + skipped, PICK_BESIDE(new_v) + skipped};

  float4 gradient = load4<WIDTH>(PICK4(g) + start, a.i, a.n);
  if (SCALED) {
    gradient *= unscale;
    store4<WIDTH>(PICK_BESIDE(new_p) + start, a.i, a.n, gradient);
  }
  const float4 old = load4<WIDTH>(PICK4(p) + start, a.i, a.n);
  const float4 change = step<WIDTH, AMSGRAD>(a, gradient * factor, m, v, most, lane % 32);
  const float4 next = old * a.decay - change;
  store4<WIDTH>(PICK4(new_p) + start, a.i, a.n, STOCHASTIC ? by_chance(a, next) : next);
}

template <typename T, int WIDTH>
[[max_total_threads_per_threadgroup(512)]] kernel void adamw_norm(
    device const T* x0 [[buffer(0)]],
    device const T* x1 [[buffer(1)]],
    device const T* x2 [[buffer(2)]],
    device const T* x3 [[buffer(3)]],
    device const T* x4 [[buffer(4)]],
    device const T* x5 [[buffer(5)]],
    device const T* x6 [[buffer(6)]],
    device float* sums [[buffer(7)]],
    constant uint& values_per_sum [[buffer(8)]],
    constant long* table [[buffer(9)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  // table: values, first threadgroup and first sum of each slot
  threadgroup float scratch[32];
  uint slot = 0;
  while (slot < 6 && group >= uint(table[7 + slot + 1])) {
    ++slot;
  }
  const uint of_tensor = group - uint(table[7 + slot]);
  const ulong first = ulong(of_tensor) * values_per_sum;
  const uint count = uint(min(ulong(table[slot]) - first, ulong(values_per_sum)));
  device const T* x = PICK7(x) + first;
  float sum = 0.0f;
  for (uint i = lane * 4; i < count; i += lanes * 4) {
    const float4 v = load4<WIDTH>(x, i, count);
    sum += dot(v, v);
  }
  sum = threadgroup_sum(sum, scratch, lane, lanes);
  if (lane == 0) {
    sums[uint(table[14 + slot]) + of_tensor] = sum;
  }
}

// One threadgroup.
[[max_total_threads_per_threadgroup(512)]] kernel void adamw_norm_total(
    device const float* sums [[buffer(0)]],
    device float* norm [[buffer(1)]],
    constant uint& count [[buffer(2)]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  float sum = 0.0f;
  for (uint i = lane; i < count; i += lanes) {
    sum += sums[i];
  }
  sum = threadgroup_sum(sum, scratch, lane, lanes);
  if (lane == 0) {
    norm[0] = precise::sqrt(sum);
  }
}
