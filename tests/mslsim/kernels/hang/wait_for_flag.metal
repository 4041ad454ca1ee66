#include <metal_stdlib>
using namespace metal;

kernel void wait(device atomic_uint* flag [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  if (t == 0) {
    while (atomic_load_explicit(flag, memory_order_relaxed) == 0) {
    }
  } else {
    atomic_store_explicit(flag, 1u, memory_order_relaxed);
  }
}
