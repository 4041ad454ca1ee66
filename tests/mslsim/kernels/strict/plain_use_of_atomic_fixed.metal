#include <metal_stdlib>
using namespace metal;

kernel void k(device atomic_uint* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(out, i, memory_order_relaxed);
}
