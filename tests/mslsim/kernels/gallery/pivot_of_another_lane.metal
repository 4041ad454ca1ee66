#include <metal_stdlib>
using namespace metal;

// Each lane scales its row by the first row's pivot; lane 0 overwrites that pivot.
kernel void scale(device float* x [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  threadgroup float row[32];
  row[t] = x[t];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const float pivot = row[0];
  row[t] = row[t] / pivot;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  x[t] = row[31 - t];
}
