#include <metal_stdlib>
using namespace metal;

kernel void histogram(device const int* x [[buffer(0)]], device atomic_uint* bins [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(&bins[x[i] / 10], 1u, memory_order_relaxed);
}
