#include <metal_stdlib>
using namespace metal;

struct Sizes {
  uint rows;
};

kernel void k(device float* out [[buffer(0)]], constant Sizes& s [[buffer(1)]],
              uint i [[thread_position_in_grid]]) {
  out[i] = s.rows;
}
