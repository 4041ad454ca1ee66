#include <metal_stdlib>
using namespace metal;

kernel void accumulate(device atomic_float* sum [[buffer(0)]], device const float* x [[buffer(1)]],
                       uint i [[thread_position_in_grid]],
                       uint t [[thread_position_in_threadgroup]]) {
  atomic_fetch_add_explicit(&sum[t], x[i], memory_order_relaxed);
}
