#include <metal_stdlib>
using namespace metal;

kernel void fill(texture2d<float, access::write> out [[texture(0)]],
                 uint2 at [[thread_position_in_grid]]) {
  if (at.x < out.get_width() && at.y < out.get_height()) out.write(float4(1), at);
}
