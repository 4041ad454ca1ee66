# SPDX-License-Identifier: MIT
"""Fragment functions, run for every pixel of a picture."""

import numpy as np
import pytest

import mslsim

HEAD = """#include <metal_stdlib>
using namespace metal;
struct Vertex { float4 position [[position]]; float2 uv; half3 tint [[flat]]; int level; };
vertex Vertex corner(uint i [[vertex_id]]) { Vertex v; v.position = float4(i); return v; }
"""
CORNERS = [(0, 0), (1, 0), (0, 1), (1, 1)]
GIVEN = {"uv": CORNERS, "tint": (1, 0.5, 0.25), "level": 3}


def uv(rows, columns):
    y, x = np.mgrid[:rows, :columns]
    return (x + 0.5) / columns, (y + 0.5) / rows


def render(text, *args, **options):
    return mslsim.render(HEAD + text, "shade", *args, **{"inputs": GIVEN, **options})


@pytest.mark.parametrize("checks", ["none", "all"])
def test_inputs_are_interpolated_and_textures_sampled(checks):
    image = np.random.default_rng(0).random((6, 10, 4)).astype(np.float32)
    out = np.zeros((6, 10, 4), np.float32)
    shade = """fragment float4 shade(Vertex in [[stage_in]], constant float& gain [[buffer(0)]],
        texture2d<float> t [[texture(0)]], sampler s [[sampler(0)]]) {
      return float4(t.sample(s, in.uv).rgb * float3(in.tint) * gain, in.position.x + in.level);
    }"""
    report = render(
        shade, out, [2.0], textures={0: image}, samplers={0: mslsim.Sampler()}, checks=checks
    )
    assert report.ok, str(report)
    np.testing.assert_allclose(out[..., :3], 2 * image[..., :3] * [1, 0.5, 0.25], rtol=1e-6)
    np.testing.assert_array_equal(out[3, :, 3], np.arange(10) + 3.5)


@pytest.mark.parametrize("rows,columns", [(16, 8), (5, 7)])
def test_derivatives_are_those_of_the_square(rows, columns):
    out = np.zeros((rows, columns, 3), np.float32)
    shade = """fragment float3 shade(Vertex in [[stage_in]]) {
      const float v = in.uv.x * 3 + in.uv.y * in.uv.y;
      return float3(dfdx(v), dfdy(v), fwidth(in.uv.x));
    }"""
    assert render(shade, out).ok
    y = (np.arange(rows + rows % 2) + 0.5) / rows
    below = np.repeat(y[1::2] ** 2 - y[::2] ** 2, 2)[:rows, None] * np.ones(columns)
    np.testing.assert_allclose(out[..., 0], 3 / columns, rtol=1e-5)
    np.testing.assert_allclose(out[..., 1], below, rtol=1e-4)
    np.testing.assert_allclose(out[..., 2], 1 / columns, rtol=1e-5)


def test_several_colors_blending_and_discarding():
    shade = """struct Colors { half4 light [[color(0)]]; uint id [[color(2)]]; };
    fragment Colors shade(Vertex in [[stage_in]], half4 before [[color(0)]]) {
      if (in.uv.x > 0.5f) discard_fragment();
      Colors c;
      c.light = before * 0.5h;
      c.id = uint(in.position.y);
      return c;
    }"""
    light, ids = np.ones((4, 6, 4), np.float16), np.full((4, 6), 9, np.uint8)
    report = render(shade, {0: light, 2: ids})
    assert report.ok, str(report)
    kept = uv(4, 6)[0] <= 0.5
    np.testing.assert_array_equal(light[..., 0], np.where(kept, 0.5, 1))
    np.testing.assert_array_equal(ids, np.where(kept, np.arange(4)[:, None], 9))


def test_findings_are_at_their_lines():
    shade = """fragment float4 shade(Vertex in [[stage_in]], constant float* rows [[buffer(0)]]) {
      return rows[uint(in.position.y)];
    }"""
    out = np.zeros((4, 4, 4), np.float32)
    (finding,) = render(shade, out, [np.ones(3, np.float32)], name="shade.metal").findings
    assert finding.kind == "bounds" and (finding.file, finding.line) == ("shade.metal", 6)


@pytest.mark.parametrize(
    "text,options,said",
    [
        ("fragment float4 other() { return 0; }", {}, "no fragment function 'shade'"),
        ("fragment float4 shade(Vertex v [[stage_in]]) { return 0; }", {"inputs": {}}, "'uv'"),
        (
            "fragment float4 shade() { return 0; }",
            {"inputs": {"color": 1}},
            "has no inputs ['color']",
        ),
    ],
)
def test_what_is_missing_is_told(text, options, said):
    (finding,) = render(text, np.zeros((2, 2), np.float32), **options).findings
    assert said in finding.message
