#include <metal_stdlib>
using namespace metal;

kernel void centre(device float* x [[buffer(0)]], uint t [[thread_position_in_threadgroup]],
                   uint n [[threads_per_threadgroup]]) {
  threadgroup float mean;
  for (uint row = 0; row < 2; ++row) {
    if (t == 0) {
      float sum = 0;
      for (uint i = 0; i < n; ++i) sum += x[row * n + i];
      mean = sum / n;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    x[row * n + t] -= mean;
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  }
}
