// SPDX-License-Identifier: MIT
// m = m + (1 - beta1) (g - m),  v = beta2 v + (1 - beta2) g^2
// p = decay p - step_size m / (sqrt(v) inverse_root + eps)
//
// Up to seven tensors per launch. A threadgroup belongs to one tensor, each of its threads takes
// four values, so that a simdgroup has a block of 128: moments in 8 bits (S = uchar) are stored as
// described in ops/train/_eight_bit.py, block by block. WIDTH = 1 is for tensors that are not
// aligned to four values. With amsgrad three tensors have slots of their own, and slot i + 3 is in
// the place of v for the largest v of slot i. The norm: a sum of squares per threadgroup and run of
// values, then the root of their sum.

#include "reduce.h"

// The numbers of a step, and what a tensor's values need to know of their place.
struct adamw {
  float decay, keep1, beta2, keep2, step_size, inverse_root, eps, gradient_factor, unscale;
  bool has_most;
  bool stochastic;
  uint seed;
  long i;
  long n;
};

template <int WIDTH, typename T>
inline float4 load4(device const T* x, long i, long n) {
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
inline void store4(device T* x, long i, long n, float4 v) {
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
inline float4 update(
    thread const adamw& a, float4 g, thread float4& m, thread float4& v, thread float4& most) {
  m = m + (g - m) * a.keep1;
  v = v * a.beta2 + g * g * a.keep2;
  float4 divisor = v;
  if (a.has_most) {
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
  const uint place = uint(a.i % 128);
  return hash(a.seed + uint(a.i / 128) * 0x9e3779b9u) +
         uint4(place, place + 1, place + 2, place + 3) * 0x9e3779b1u;
}

// Moments in float32.
template <int WIDTH>
inline float4 step(
    thread const adamw& a,
    float4 g,
    device float* m,
    device float* v,
    device float* most,
    uint lane) {
  float4 first = load4<WIDTH>(m, a.i, a.n);
  float4 second = load4<WIDTH>(v, a.i, a.n);
  float4 top = float4(0.0f);
  if (a.has_most) {
    top = load4<WIDTH>(most, a.i, a.n);
  }
  const float4 change = update(a, g, first, second, top);
  store4<WIDTH>(m, a.i, a.n, first);
  store4<WIDTH>(v, a.i, a.n, second);
  if (a.has_most) {
    store4<WIDTH>(most, a.i, a.n, top);
  }
  return change;
}

// The block of a moment in 8 bits that a simdgroup works on. Its origin is read and written by one
// lane alone.
struct eight_bit {
  device uchar* codes;
  uint origin;
  uint new_origin;
  uint largest;
  uint lane;

  eight_bit(device uchar* moment, long block, uint lane, bool is_signed)
      : codes(moment + block * 132), largest(is_signed ? 127 : 255), lane(lane) {
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
      *(device uint*)(codes + 128) = new_origin;
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
    *(device char4*)(codes + lane * 4) = char4(select(code, -code, v < 0.0f));
  }
  void put(float4 v, uint4 noise) {
    const int4 code = int4((as_type<uint4>(v) + (noise >> 12)) >> 20) - int(new_origin);
    *(device uchar4*)(codes + lane * 4) = uchar4(clamp(code, 0, 255));
  }
};

// Moments in 8 bits. New codes are counted from the largest value that can come up.
template <int WIDTH>
inline float4 step(
    thread const adamw& a,
    float4 g,
    device uchar* m,
    device uchar* v,
    device uchar* most,
    uint lane) {
  const long block = a.i / 128;
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
  if (a.has_most) {
    eight_bit top_block(most, block, lane, false);
    top_block.set_bound(max(top_block.bound(), second_bound));
    top = top_block.get();
    const float4 change = update(a, g, first, second, top);
    top_block.put(top, chance);
    first_block.put_signed(first, chance);
    second_block.put(second, chance);
    return change;
  }
  const float4 change = update(a, g, first, second, top);
  first_block.put_signed(first, chance);
  second_block.put(second, chance);
  return change;
}

// p rounded to T, or by chance to one of the two bfloat values around it.
template <typename T>
inline float4 by_chance(thread const adamw& a, float4 p, T) {
  return p;
}

inline float4 by_chance(thread const adamw& a, float4 p, bfloat) {
  if (!a.stochastic) {
    return p;
  }
  return as_type<float4>((as_type<uint4>(p) + (noise(a) & 0xffffu)) & 0xffff0000u);
}

#define PICK(x)       \
  (slot == 0   ? x##0 \
   : slot == 1 ? x##1 \
   : slot == 2 ? x##2 \
   : slot == 3 ? x##3 \
   : slot == 4 ? x##4 \
   : slot == 5 ? x##5 \
               : x##6)

template <typename T, typename S, int WIDTH>
kernel void adamw_step(
    device T* p0 [[buffer(0)]],
    device T* p1 [[buffer(1)]],
    device T* p2 [[buffer(2)]],
    device T* p3 [[buffer(3)]],
    device T* p4 [[buffer(4)]],
    device T* p5 [[buffer(5)]],
    device T* p6 [[buffer(6)]],
    device T* g0 [[buffer(7)]],
    device T* g1 [[buffer(8)]],
    device T* g2 [[buffer(9)]],
    device T* g3 [[buffer(10)]],
    device T* g4 [[buffer(11)]],
    device T* g5 [[buffer(12)]],
    device T* g6 [[buffer(13)]],
    device S* m0 [[buffer(14)]],
    device S* m1 [[buffer(15)]],
    device S* m2 [[buffer(16)]],
    device S* m3 [[buffer(17)]],
    device S* m4 [[buffer(18)]],
    device S* m5 [[buffer(19)]],
    device S* m6 [[buffer(20)]],
    device S* v0 [[buffer(21)]],
    device S* v1 [[buffer(22)]],
    device S* v2 [[buffer(23)]],
    device S* v3 [[buffer(24)]],
    device S* v4 [[buffer(25)]],
    device S* v5 [[buffer(26)]],
    device S* v6 [[buffer(27)]],
    device const float* grad_norm [[buffer(28)]],
    constant float* numbers [[buffer(29)]],
    constant long* table [[buffer(30)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  // table: values, first threadgroup and seed of each slot, then flags
  uint slot = 0;
  while (slot < 6 && long(group) >= table[7 + slot + 1]) {
    ++slot;
  }
  adamw a;
  a.decay = numbers[0];
  a.keep1 = numbers[1];
  a.beta2 = numbers[2];
  a.keep2 = numbers[3];
  a.step_size = numbers[4];
  a.inverse_root = numbers[5];
  a.eps = numbers[6];
  a.gradient_factor = numbers[7];
  a.unscale = numbers[8];
  if (numbers[9] > 0.0f) {
    const float factor = numbers[9] / (grad_norm[0] * a.unscale + 1e-6f);
    a.gradient_factor *= factor > 1.0f ? 1.0f : factor;
  }
  a.has_most = table[21] != 0;
  a.stochastic = table[22] != 0;
  a.n = table[slot];
  a.seed = uint(table[14 + slot]);
  a.i = ((long(group) - table[7 + slot]) * lanes + lane) * 4;
  // whole simdgroups leave: a block is shared by one
  if (a.i / 128 * 128 >= a.n) {
    return;
  }
  device T* p = PICK(p);
  device T* g = PICK(g);
  device S* m = PICK(m);
  device S* v = PICK(v);
  device S* most = slot == 0 ? v3 : slot == 1 ? v4 : v5;

  float4 gradient = load4<WIDTH>(g, a.i, a.n);
  if (a.unscale != 1.0f) {
    gradient *= a.unscale;
    store4<WIDTH>(g, a.i, a.n, gradient);
  }
  const float4 old = load4<WIDTH>(p, a.i, a.n);
  const float4 change = step<WIDTH>(a, gradient * a.gradient_factor, m, v, most, lane % 32);
  store4<WIDTH>(p, a.i, a.n, by_chance(a, old * a.decay - change, T(0.0f)));
}

template <typename T, int WIDTH>
kernel void adamw_norm(
    device const T* x0 [[buffer(0)]],
    device const T* x1 [[buffer(1)]],
    device const T* x2 [[buffer(2)]],
    device const T* x3 [[buffer(3)]],
    device const T* x4 [[buffer(4)]],
    device const T* x5 [[buffer(5)]],
    device const T* x6 [[buffer(6)]],
    device float* sums [[buffer(7)]],
    constant long& values_per_sum [[buffer(8)]],
    constant long* table [[buffer(9)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  // table: values, first threadgroup and first sum of each slot
  threadgroup float scratch[32];
  uint slot = 0;
  while (slot < 6 && long(group) >= table[7 + slot + 1]) {
    ++slot;
  }
  device const T* x = PICK(x);
  const long first = (long(group) - table[7 + slot]) * values_per_sum;
  const long last = min(table[slot], first + values_per_sum);
  float sum = 0.0f;
  for (long i = first + lane * 4; i < last; i += lanes * 4) {
    const float4 v = load4<WIDTH>(x, i, last);
    sum += dot(v, v);
  }
  sum = threadgroup_sum(sum, scratch, lane, lanes);
  if (lane == 0) {
    sums[table[14 + slot] + group - table[7 + slot]] = sum;
  }
}

// One threadgroup.
template <typename T>
kernel void adamw_norm_total(
    device const T* sums [[buffer(0)]],
    device float* norm [[buffer(1)]],
    constant long& count [[buffer(2)]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  float sum = 0.0f;
  for (long i = lane; i < count; i += lanes) {
    sum += sums[i];
  }
  sum = threadgroup_sum(sum, scratch, lane, lanes);
  if (lane == 0) {
    norm[0] = precise::sqrt(sum);
  }
}

#define INSTANTIATE_STEP(T, S, WIDTH)                                   \
  template [[host_name("adamw_step_" #T "_" #S "_" #WIDTH)]] [[kernel]] \
  decltype(adamw_step<T, S, WIDTH>) adamw_step<T, S, WIDTH>;

#define INSTANTIATE_NORM(T, WIDTH)                               \
  template [[host_name("adamw_norm_" #T "_" #WIDTH)]] [[kernel]] \
  decltype(adamw_norm<T, WIDTH>) adamw_norm<T, WIDTH>;

#define INSTANTIATE(T)          \
  INSTANTIATE_STEP(T, float, 1) \
  INSTANTIATE_STEP(T, float, 4) \
  INSTANTIATE_STEP(T, uchar, 1) \
  INSTANTIATE_STEP(T, uchar, 4) \
  INSTANTIATE_NORM(T, 1)        \
  INSTANTIATE_NORM(T, 4)

INSTANTIATE(float)
INSTANTIATE(half)
INSTANTIATE(bfloat)

template [[host_name("adamw_norm_total_float")]] [[
    kernel]] decltype(adamw_norm_total<float>) adamw_norm_total<float>;
