#include <metal_stdlib>
using namespace metal;

kernel void vote(device float* out [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  threadgroup float winner;
  if (t == 62) {
    winner = t;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = winner;
}
