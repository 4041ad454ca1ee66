#include <metal_stdlib>
using namespace metal;

kernel void twice(device float* x [[buffer(0)]], constant uint& n [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {
  if (i <= n) {
    x[i] *= 2;
  }
}
