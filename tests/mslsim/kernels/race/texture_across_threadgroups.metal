#include <metal_stdlib>
using namespace metal;

kernel void blur(texture2d<float, access::read_write> t [[texture(0)]],
                 uint2 at [[thread_position_in_grid]]) {
  const uint right = min(at.x + 1, t.get_width() - 1);
  t.write((t.read(at) + t.read(uint2(right, at.y))) / 2, at);
}
