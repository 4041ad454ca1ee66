#include <metal_stdlib>
using namespace metal;

kernel void difference(texture2d<float, access::read> in [[texture(0)]],
                       texture2d<float, access::write> out [[texture(1)]],
                       uint2 at [[thread_position_in_grid]]) {
  out.write(in.read(uint2(min(at.x + 1, in.get_width() - 1), at.y)) - in.read(at), at);
}
