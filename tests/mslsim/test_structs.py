# SPDX-License-Identifier: MIT
"""Structs as dicts, packed as the source declares them; arrays in them are argument buffers."""

import numpy as np
import pytest

import mslsim

SOURCE = """#include <metal_stdlib>
using namespace metal;
constant constexpr int AXES = 3;
typedef struct { char tag; float3 scale; ushort counts[AXES], last; } Inner;
struct Arguments {
  int n;
  ulong offset;
  packed_float3 p;
  Inner inner;
  bool wanted;
  float total() constant const { return p.x + p.y; }
};
struct Tables { device float* a [[id(0)]]; constant float* c [[id(1)]]; uint n [[id(2)]]; };
kernel void fields(device float* o [[buffer(0)]], constant Arguments& k [[buffer(1)]]) {
  o[0] = k.n; o[1] = k.offset; o[2] = k.p.z; o[3] = k.inner.tag; o[4] = k.inner.scale.y;
  o[5] = k.inner.counts[2]; o[6] = k.inner.last; o[7] = k.wanted; o[8] = sizeof(Arguments);
}
kernel void pointed(constant Tables& t [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (i < t.n) t.a[i] = t.c[i];
}
"""
VALUES = {"n": -3, "offset": 2**40, "p": [1, 2, 3], "wanted": True,
          "inner": {"tag": 7, "scale": (4, 5, 6), "counts": [1, 2, 9], "last": 8}}  # fmt: skip


@pytest.mark.parametrize("checks", ["none", "all"])
def test_members_are_where_the_compiler_has_them(checks):
    out = np.zeros(9, np.float32)
    mslsim.compile_shader(SOURCE, checks).fields(out, VALUES, threads=1, group_size=1)
    assert out.tolist() == [-3, 2**40, 3, 7, 5, 9, 8, 1, 96]


@pytest.mark.parametrize("checks", ["none", "all"])
def test_arrays_in_a_struct_are_pointers(checks):
    a, c = np.zeros(8, np.float32), np.arange(10, dtype=np.float32)
    library = mslsim.compile_shader(SOURCE, checks)
    library.pointed({"a": a, "c": c[2:], "n": 8}, threads=8, group_size=8)
    assert a.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]


def test_bounds_behind_a_pointer():
    a, c = np.zeros(6, np.float32), np.ones(8, np.float32)
    library = mslsim.compile_shader(SOURCE, on_finding="collect")
    report = library.pointed({"a": a, "c": c, "n": 8}, threads=8, group_size=8)
    assert [f.kind for f in report.findings] == ["bounds"]
    assert "of pointed[0].a of 24 bytes by thread 6" in report.findings[0].message
    assert a.tolist() == [1] * 6


def test_what_does_not_fit_is_refused():
    library = mslsim.compile_shader(SOURCE)
    with pytest.raises(ValueError, match=r"Tables has no member \['b'\]"):
        library.pointed({"b": 1}, threads=1, group_size=1)
    with pytest.raises(TypeError, match=r"pointed\[0\].a is a pointer"):
        library.pointed({"a": 1}, threads=1, group_size=1)
    with pytest.raises(TypeError, match="argument 0 is a dict, but no known struct"):
        library.fields({"a": 1}, VALUES, threads=1, group_size=1)
