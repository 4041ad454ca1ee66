#include <metal_stdlib>
using namespace metal;

kernel void count(device uint* out [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  threadgroup atomic_uint counter;
  if (t == 0) {
    atomic_store_explicit(&counter, 0u, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&counter, 1u, memory_order_relaxed);
  if (t == 0) {
    out[0] = *(threadgroup uint*)&counter;
  }
}
