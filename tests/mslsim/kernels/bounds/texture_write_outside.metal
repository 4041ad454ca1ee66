#include <metal_stdlib>
using namespace metal;

kernel void fill(texture2d<float, access::write> out [[texture(0)]],
                 uint2 at [[thread_position_in_grid]]) {
  out.write(float4(1), at);
}
