#include <metal_stdlib>
using namespace metal;

kernel void splat(device const uint2* at [[buffer(0)]],
                  texture2d<float, access::write> out [[texture(0)]],
                  uint i [[thread_position_in_grid]]) {
  if (i % 2 == 0) out.write(float4(i), at[i / 2]);
}
