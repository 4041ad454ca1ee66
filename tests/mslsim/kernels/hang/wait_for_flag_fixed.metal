#include <metal_stdlib>
using namespace metal;

kernel void wait(device atomic_uint* flag [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  if (t == 0) {
    atomic_fetch_or_explicit(flag, 2u, memory_order_relaxed);
  } else {
    atomic_store_explicit(flag, 1u, memory_order_relaxed);
  }
}
