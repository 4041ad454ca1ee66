#include <metal_stdlib>
using namespace metal;

kernel void sum(device const float* x [[buffer(0)]], device float* partial [[buffer(1)]],
                device atomic_uint* done [[buffer(2)]], device float* out [[buffer(3)]],
                uint g [[threadgroup_position_in_grid]], uint groups [[threadgroups_per_grid]],
                uint t [[thread_position_in_threadgroup]]) {
  const float s = simd_sum(x[g * 32 + t]);
  if (t == 0) {
    partial[g] = s;
    if (atomic_fetch_add_explicit(done, 1u, memory_order_relaxed) == groups - 1) {
      float total = 0;
      for (uint i = 0; i < groups; ++i) total += partial[i];
      out[0] = total;
    }
  }
}
