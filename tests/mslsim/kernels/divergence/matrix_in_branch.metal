#include <metal_stdlib>
using namespace metal;

kernel void square(device float* x [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  simdgroup_float8x8 a;
  simdgroup_load(a, x, 8);
  if (t < 16) {
    simdgroup_multiply(a, a, a);
  }
  simdgroup_barrier(mem_flags::mem_device);
  simdgroup_store(a, x, 8);
}
