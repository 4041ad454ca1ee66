#include <metal_stdlib>
using namespace metal;

kernel void blur(texture2d<float, access::read_write> t [[texture(0)]],
                 uint2 at [[thread_position_in_grid]]) {
  t.write(t.read(at) / 2, at);
}
