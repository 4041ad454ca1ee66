#include <metal_stdlib>
using namespace metal;

kernel void scan(device int* x [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  int v = x[t];
  for (ushort d = 1; d < 32; d *= 2) {
    const int before = simd_shuffle_and_fill_up(v, 0, d);
    v += before;
  }
  threadgroup_barrier(mem_flags::mem_none);
  x[t] = v;
}
