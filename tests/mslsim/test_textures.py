# SPDX-License-Identifier: MIT
"""Textures and samplers: numpy arrays in, numpy arrays out."""

from functools import cache

import numpy as np
import pytest

import mslsim

SOURCE = """#include <metal_stdlib>
using namespace metal;
kernel void copy(texture2d<float, access::read> a [[texture(0)]],
                 texture2d<float, access::write> b [[texture(1)]],
                 uint2 g [[thread_position_in_grid]]) {
  if (g.x < b.get_width() && g.y < b.get_height()) b.write(a.read(g).bgra, g);
}
kernel void unguarded(texture2d<half, access::read_write> t [[texture(0)]],
                      uint2 g [[thread_position_in_grid]]) { t.write(t.read(g) + 1, g); }
kernel void integers(texture2d<int> a [[texture(0)]],
                     texture2d<int, access::write> b [[texture(1)]],
                     uint2 g [[thread_position_in_grid]]) {
  constexpr sampler s(coord::pixel);
  b.write(a.sample(s, float2(g) + 0.5f) * 2, ushort2(g));
}
kernel void sampled(texture2d<float> t [[texture(3)]], sampler s [[sampler(0)]],
                    device const float2* at [[buffer(0)]], device float4* out [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) { out[i] = t.sample(s, at[i]); }
kernel void volumes(texture3d<float> v [[texture(0)]],
                    texture2d_array<float, access::read> a [[texture(1)]],
                    texturecube<float> c [[texture(2)]], texture1d<float> line [[texture(4)]],
                    device float* o [[buffer(0)]]) {
  constexpr sampler s(filter::linear, address::clamp_to_edge);
  o[0] = v.sample(s, float3(0.5)).x;
  o[1] = a.read(uint2(1, 0), 2).x;
  o[2] = c.sample(s, float3(0, -1, 0)).x;
  o[3] = line.sample(s, 0.5f).x;
  o[4] = a.get_array_size() * 100 + v.get_depth() * 10 + c.get_width();
}
kernel void gathered(texture2d<float> t [[texture(0)]], depth2d<float> d [[texture(1)]],
                     device float4* o [[buffer(0)]]) {
  constexpr sampler s(filter::linear, address::clamp_to_edge, compare_func::less);
  o[0] = t.gather(s, float2(0.5), int2(0), component::x);
  o[1] = float4(d.sample_compare(s, float2(0.5), 1.5f), d.read(uint2(1, 1)), 0, 0);
}
kernel void samples(texture2d_ms<float, access::read> t [[texture(0)]],
                    depth2d<float> d [[texture(1)]], device float4* o [[buffer(0)]]) {
  constexpr sampler s(filter::linear, compare_func::less);
  o[0] = float4(t.get_num_samples(), t.get_width(), t.read(uint2(1, 0), 2).x, is_null_texture(t));
  o[1] = d.gather_compare(s, float2(0.5), 1.5f);
}
kernel void clash(texture2d<float, access::write> t [[texture(0)]],
                  uint i [[thread_position_in_grid]]) { t.write(float4(i), uint2(0, 0)); }
"""


@cache
def library():
    return mslsim.compile_shader(SOURCE, on_finding="collect")


def line_of(part):
    return next(i for i, line in enumerate(SOURCE.splitlines(), 1) if part in line)


def image(*shape, dtype=np.float32):
    return np.random.default_rng(0).uniform(0, 1, shape).astype(dtype)


def test_texels_are_read_and_written():
    a, b = image(5, 7, 4), np.zeros((5, 7, 4), np.float32)
    assert library().copy(threads=(8, 8), group_size=(8, 8), textures={0: a, 1: b}).ok
    np.testing.assert_array_equal(b, a[..., [2, 1, 0, 3]])


def test_bytes_are_numbers_between_0_and_1():
    a = np.random.default_rng(0).integers(0, 256, (3, 4, 4), np.uint8)
    b, c = np.zeros((3, 4, 4), np.uint8), np.zeros((3, 4, 4), np.float16)
    library().copy(threads=(4, 3), group_size=(4, 3), textures={0: a, 1: b})
    np.testing.assert_array_equal(b, a[..., [2, 1, 0, 3]])
    library().copy(threads=(4, 3), group_size=(4, 3), textures={0: a, 1: c})
    np.testing.assert_allclose(c, a[..., [2, 1, 0, 3]] / 255, rtol=1e-3)


def test_missing_channels_are_0_and_1():
    a, b = image(2, 2), np.zeros((2, 2, 4), np.float32)
    library().copy(threads=(2, 2), group_size=(2, 2), textures={0: a, 1: b})
    assert b[..., 0].max() == 0 and b[..., 3].min() == 1
    np.testing.assert_array_equal(b[..., 2], a)


def test_integers():
    a, b = np.arange(6, dtype=np.int16).reshape(2, 3) - 3, np.zeros((2, 3), np.int32)
    library().integers(threads=(3, 2), group_size=(3, 2), textures={0: a, 1: b})
    assert b.tolist() == [[-6, -4, -2], [0, 2, 4]]


def at(texels, x, y, mode):
    """Texel (x, y) of one that may lie outside, by numpy's words for the same rules."""
    pad = {"clamp_to_edge": "edge", "repeat": "wrap", "mirrored_repeat": "symmetric"}.get(mode)
    wide = np.pad(texels, 16, pad) if pad else np.pad(texels, 16)
    return wide[y + 16, x + 16]


@pytest.mark.parametrize(
    "mode", ["clamp_to_edge", "repeat", "mirrored_repeat", "clamp_to_zero", "clamp_to_border"]
)
@pytest.mark.parametrize("filter", ["nearest", "linear"])
def test_samples(mode, filter):
    texels, n = image(4, 4), 64
    where = np.random.default_rng(1).uniform(-1, 2, (n, 2)).astype(np.float32)
    out = np.zeros((n, 4), np.float32)
    sampler = mslsim.Sampler(filter=filter, address=mode)
    assert (
        library()
        .sampled(where, out, threads=n, group_size=32, textures={3: texels}, samplers={0: sampler})
        .ok
    )
    p = where.astype(np.float64) * 4 - (0.5 if filter == "linear" else 0)
    x, y = np.floor(p).astype(int).T
    fx, fy = (p - np.floor(p)).T if filter == "linear" else np.zeros((2, n))
    wanted = [
        (1 - v) * ((1 - u) * at(texels, i, j, mode) + u * at(texels, i + 1, j, mode))
        + v * ((1 - u) * at(texels, i, j + 1, mode) + u * at(texels, i + 1, j + 1, mode))
        for i, j, u, v in zip(x, y, fx, fy, strict=True)
    ]
    np.testing.assert_allclose(out[:, 0], wanted, atol=1e-5)


def test_volumes_arrays_cubes_and_lines():
    volume, layers, cube = image(2, 2, 2), image(3, 2, 2), image(6, 2, 2)
    line, out = image(2), np.zeros(5, np.float32)
    textures = {0: volume, 1: layers, 2: cube, 4: line}
    assert library().volumes(out, threads=1, group_size=1, textures=textures).ok
    wanted = [volume.mean(), layers[2, 0, 1], cube[3].mean(), line.mean(), 322]
    np.testing.assert_allclose(out, wanted, rtol=1e-6)


def test_gather_and_compare():
    t, d = np.array([[1, 2], [3, 4]], np.float32), np.array([[1, 2], [1, 2]], np.float32)
    out = np.zeros((2, 4), np.float32)
    assert library().gathered(out, threads=1, group_size=1, textures={0: t, 1: d}).ok
    assert out.tolist() == [[3, 4, 2, 1], [0.5, 2, 0, 0]]


def test_a_texel_outside_is_told_and_dropped():
    t = np.zeros((3, 5, 4), np.float16)
    report = library().unguarded(threads=(8, 3), group_size=(8, 3), textures={0: t})
    assert {(f.kind, f.line) for f in report.findings} == {("bounds", line_of("t.write(t.read"))}
    assert "read of texel (5, 0, 0) outside of t [[texture(0)]]" in report.findings[0].message
    assert (t == 1).all()


def test_two_writes_of_one_texel_are_a_race():
    report = library().clash(threads=32, group_size=32, textures={0: np.zeros((2, 2), np.float32)})
    assert {(f.kind, f.line) for f in report.findings} == {("race", line_of("t.write(float4(i)"))}


def test_a_texture_must_be_given_and_fit():
    with pytest.raises(ValueError, match=r"t \[\[texture\(0\)\]\] is not given"):
        library().clash(threads=1, group_size=1)
    with pytest.raises(TypeError, match="an array of 2 axes"):
        library().clash(threads=1, group_size=1, textures={0: np.zeros(3, np.float32)})
    t = np.zeros((2, 2), np.float32)
    with pytest.raises(ValueError, match=r"no \[\[texture\(1\)\]\]"):
        library().clash(threads=1, group_size=1, textures={0: t, 1: t})


def test_samples_of_a_texel_and_comparisons_of_gather():
    texels, depth = image(4, 2, 3, 1), np.array([[1, 2], [3, 0]], np.float32)
    out = np.zeros((2, 4), np.float32)
    assert library().samples(out, threads=1, group_size=1, textures={0: texels, 1: depth}).ok
    np.testing.assert_array_equal(out[0], [4, 3, texels[2, 0, 1, 0], 0])
    # in the order of gather, below first: 3, 0, 2, 1
    assert out[1].tolist() == [1, 0, 1, 0]
