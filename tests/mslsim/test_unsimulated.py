# SPDX-License-Identifier: MIT
"""Files with what is not simulated: their other kernels run, and the message says what it is."""

import numpy as np
import pytest

import mslsim

BESIDE = "kernel void beside(device float* x [[buffer(0)]]) { x[0] = twice(3); }\n"
START = """#include <metal_stdlib>
#include <SwiftUI/SwiftUI_Metal.h>
#include <TargetConditionals.h>
using namespace metal;
static float twice(float x) { return 2 * x; }
#if !TARGET_OS_OSX || TARGET_OS_SIMULATOR
#error not a Mac
#endif
"""

RAYS = """#include <metal_raytracing>
using namespace metal::raytracing;
struct Scene { instance_acceleration_structure everything; };
[[intersection(triangle, triangle_data, instancing)]]
bool any(float2 at [[barycentric_coord]], ray_data float& d [[payload]]) { return at.x > d; }
[[visible]] float shade(float x) { return x; }
float reach(ray r, thread intersector<triangle_data>& i) { return i.intersect(r); }
kernel void rays(instance_acceleration_structure scene [[buffer(0)]]) {
  intersector<triangle_data> i;
}
"""
MESHES = """#include <metal_mesh>
struct V { float4 at [[position]]; };
struct Payload { uint count; };
using Triangles = mesh<V, void, 64, 126, topology::triangle>;
[[object]] void plan(object_data Payload& p [[payload]], mesh_grid_properties g) { p.count = 1; }
[[mesh, max_total_threads_per_threadgroup(32)]]
void build(Triangles out, const object_data Payload& p [[payload]]) { out.set_primitive_count(1); }
[[patch(triangle, 3)]] vertex float4 bend(uint i [[patch_id]]) { return i; }
[[stitchable]] half4 ripple(float2 at, SwiftUI::Layer layer) { return layer.sample(at); }
"""
COMMANDS = """#include <metal_command_buffer>
struct Buffers { command_buffer commands [[id(0)]]; };
kernel void commands(device Buffers& b [[buffer(0)]]) {
  render_command c(b.commands, 0);
  c.draw_primitives(0);
}
"""
TILES = """struct Color { half4 value [[color(0)]]; };
kernel void tiles(imageblock<Color, imageblock_layout_implicit> tile) { tile.read(ushort2(0)); }
struct Given { float3 at [[attribute(0)]]; };
kernel void staged(Given given [[stage_in]]) {}
kernel void many(array<texture2d<float>, 4> all [[texture(0)]]) {}
"""


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (RAYS, {"rays": "ray tracing, which 'scene' is"}),
        (MESHES, {}),
        (COMMANDS, {"commands": "indirect commands"}),
        (
            TILES,
            {
                "tiles": "imageblocks, which 'tile' is",
                "staged": "stage_in, which 'given' is",
                "many": "parameters that are arrays of textures, which 'all' is",
            },
        ),
    ],
    ids=["rays", "meshes", "commands", "tiles"],
)
def test_what_is_not_simulated_costs_its_kernel_alone(text, messages):
    source = START + text + BESIDE
    found = {f.kernel: f.message for f in mslsim.lint(source) if f.kernel}
    assert found.keys() == messages.keys()
    for kernel, message in messages.items():
        assert found[kernel].endswith(f"mslsim does not simulate {message}")
    library, x = mslsim.compile_shader(source), np.zeros(1, np.float32)
    assert library.beside(x, threads=1, group_size=1).ok and x[0] == 6
    for kernel in messages:
        with pytest.raises(mslsim.CompileError, match="does not simulate"):
            library[kernel](x, threads=1, group_size=1)


def test_a_helper_that_no_kernel_reaches_is_not_compiled():
    source = START + "float broken(float x) { return missing(x); }\n" + BESIDE
    source += "kernel void uses(device float* x [[buffer(0)]]) { x[0] = broken(1); }\n"
    library, x = mslsim.compile_shader(source), np.zeros(1, np.float32)
    assert library.beside(x, threads=1, group_size=1).ok and x[0] == 6
    with pytest.raises(mslsim.CompileError, match="missing"):
        library.uses(x, threads=1, group_size=1)


GENERATED = """#include <metal_stdlib>
constant metal::float2x2 columns = {{0, 1}, {1, 0}};
template <typename...> using none = void;
template <typename T, typename = void> struct has_x : metal::false_type {};
template <typename T> struct has_x<T, none<decltype(T::x)>> : metal::true_type {};
struct Point { float x; };
kernel void sums(device float* x [[buffer(0)]], metal::uint3 at [[thread_position_in_grid]]) {
  threadgroup __attribute__((aligned(16))) float a[8];
  threadgroup alignas(16) float b[8];
  a[at.x] = x[at.x];
  b[7 - at.x] = x[at.x];
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  metal::float2x2 m = metal::float2x2(metal::float2(1.0), metal::float2(2.0));
  threadgroup float4* wide = (threadgroup float4*)b;
  x[at.x] = a[7 - at.x] + wide[at.x / 4][at.x % 4] + (columns * m[1]).x;
  if (!has_x<Point>::value || has_x<int>::value) x[at.x] = 0;
}
"""


def test_what_compilers_to_metal_write():
    x = np.arange(8, dtype=np.float32)
    report = mslsim.run(GENERATED, "sums", [x], threads=8, group_size=8)
    assert report.ok, report
    np.testing.assert_array_equal(x, 2 * np.arange(7.0, -1, -1) + 2)
