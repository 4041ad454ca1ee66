// SPDX-License-Identifier: MIT
// det A = sign(P) prod_i u_ii of A = P L U, its sign, and log |det A|. One threadgroup of 64
// threads per matrix; they share the pivots and, for the sign of P, the pairs of rows in falling
// order. Exponents are added up apart from the product: it stays in range.

#include <metal_stdlib>
using namespace metal;

// The product of numbers below 1 in size, times 2 to an exponent.
struct scaled_product {
  float product;
  int exponent;
};

inline scaled_product scaled(float product, int exponent) {
  int own;
  const float mantissa = frexp(product, own);
  return {mantissa, exponent + own};
}

template <typename T>
kernel void det_of_factors(
    device const long* rows [[buffer(0)]],
    device const T* U [[buffer(1)]],
    device T* det [[buffer(2)]],
    device T* sign_of [[buffer(3)]],
    device T* logabsdet [[buffer(4)]],
    constant long& n [[buffer(5)]],
    uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float products[32];
  threadgroup int exponents[32];
  rows += matrix * n;
  U += matrix * n * n;
  scaled_product own = {1.0f, 0};
  int falling = 0;
  for (long i = thread_index; i < n; i += threads) {
    own = scaled(own.product * U[i * n + i], own.exponent);
    for (long j = i + 1; j < n; ++j) {
      falling += rows[j] < rows[i] ? 1 : 0;
    }
  }
  own.product = falling % 2 == 0 ? own.product : -own.product;
  own = scaled(simd_product(own.product), simd_sum(own.exponent));
  if (thread_index % 32 == 0) {
    products[thread_index / 32] = own.product;
    exponents[thread_index / 32] = own.exponent;
  }
  // the parts of all simdgroups are there
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index == 0) {
    for (uint s = 1; s < threads / 32; ++s) {
      own = scaled(own.product * products[s], own.exponent + exponents[s]);
    }
    const float size = fabs(own.product);
    det[matrix] = ldexp(own.product, own.exponent);
    sign_of[matrix] = size > 0.0f ? (own.product > 0.0f ? 1.0f : -1.0f) : own.product;
    logabsdet[matrix] = precise::log(size) + float(own.exponent) * 0.69314718056f;
  }
}

template [[host_name("det_of_factors_float")]] [[
    kernel]] decltype(det_of_factors<float>) det_of_factors<float>;
