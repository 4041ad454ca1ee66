#include <metal_stdlib>
using namespace metal;

kernel void compact(device const int* x [[buffer(0)]], device atomic_uint* count [[buffer(1)]],
                    device int* out [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  if (x[i] % 2) {
    const uint at = atomic_fetch_add_explicit(count, 1u, memory_order_relaxed);
    out[at] = x[i];
  }
}
