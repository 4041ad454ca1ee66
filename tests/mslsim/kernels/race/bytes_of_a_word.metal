#include <metal_stdlib>
using namespace metal;

kernel void pack(device uchar* out [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  device uint* words = (device uint*)out;
  if (t < 16) {
    words[t] = t;
  } else {
    out[t] = t;
  }
}
