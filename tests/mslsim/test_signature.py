# SPDX-License-Identifier: MIT
"""Signatures read from the text, as the simulator's own front end finds them."""

import subprocess
import sys

import pytest

from metalcore.metal import source
from mslsim.build import Builder
from mslsim.frontend.parse import Source
from mslsim.signature import read_signatures, without_kernels

TEXT = """#include <metal_stdlib>
using namespace metal;
#define HALF(x) ((x) / 2)
constant constexpr int kRows = 8;  // kernel void commented(device float* x) {}

template <typename T>
inline T total(T v) {
  return simd_sum(v);
}

template <typename T, int N = 4>
[[max_total_threads_per_threadgroup(32 * N)]] kernel void scale(
    device const T* x [[buffer(0)]],
    device vec<T, 4>* y [[buffer(1)]],
    constant long& n [[buffer(3)]],
    device atomic_uint* count [[buffer(2)]],
    threadgroup float* extra [[threadgroup(0)]],
    uint i [[thread_position_in_grid]]) {
  constexpr int LD = N + 1;
  threadgroup T tile[kRows][LD], last;
  threadgroup float3 points[HALF(kRows) * sizeof(T)];
  threadgroup T* p = &tile[0][0];
  y[i] = total(x[i]);
}

kernel void plain(device float* x) { x[0] = 1; }

#define INSTANTIATE(function, T, ...) \\
  template [[host_name(#function "_" #T)]] [[kernel]] decltype(function<T, __VA_ARGS__>) \\
      function<T, __VA_ARGS__>;
INSTANTIATE(scale, float, 2)
INSTANTIATE(scale, half, 16)
template [[host_name("scale_default")]] kernel void scale<half>(
    device const half*, device vec<half, 4>*, constant long&, device atomic_uint*,
    threadgroup float*, uint);
"""


def test_parameters_are_in_buffer_order() -> None:
    scale = read_signatures(TEXT)["scale"]
    read = [(p.name, p.type, p.space, p.is_scalar, p.is_written) for p in scale.parameters]
    assert read == [
        ("x", "T", "device", False, False),
        ("y", "vec<T, 4>", "device", False, True),
        ("count", "atomic_uint", "device", False, True),
        ("n", "long", "constant", True, False),
    ]
    assert [(p.name, p.attribute) for p in scale.others] == [
        ("extra", "threadgroup(0)"),
        ("i", "thread_position_in_grid"),
    ]


def test_instances_come_from_macros_and_from_templates() -> None:
    signatures = read_signatures(TEXT)
    assert list(signatures) == ["scale", "plain"]
    assert signatures["scale"].instances == {
        "scale_float": ("float", "2"),
        "scale_half": ("half", "16"),
        "scale_default": ("half",),
    }
    assert signatures["plain"].instances == {"plain": ()}


def test_threadgroup_memory_of_each_instance() -> None:
    scale = read_signatures(TEXT)["scale"]
    assert scale.threadgroup_bytes_of("scale_float") == (8 * 3 + 1) * 4 + 16 * 4 * 4
    assert scale.threadgroup_bytes_of("scale_half") == (8 * 17 + 1) * 2 + 16 * 4 * 2
    assert scale.threadgroup_bytes_of("scale_default") == (8 * 5 + 1) * 2 + 16 * 4 * 2
    assert scale.threadgroup_bytes == scale.threadgroup_bytes_of("scale_half")
    assert scale.max_threads_of("scale_half") == 512
    assert read_signatures(TEXT)["plain"].max_threads_of("plain") is None


def test_collectives_are_seen_through_helpers() -> None:
    signatures = read_signatures(TEXT)
    assert signatures["scale"].has_collectives
    assert not signatures["plain"].has_collectives


def test_body_and_what_it_is_built_on() -> None:
    signatures = read_signatures(TEXT)
    assert signatures["plain"].body == " x[0] = 1; "
    rest = without_kernels(TEXT, signatures)
    assert "total(T v)" in rest
    assert "kRows = 8" in rest
    assert rest.count("\n") == TEXT.count("\n")
    assert read_signatures(rest) == {}


def test_what_is_no_metal_is_refused() -> None:
    with pytest.raises(ValueError, match="never closed"):
        read_signatures("kernel void f(device float* x {")


@pytest.mark.parametrize("file", source.files())
def test_metalcore_sources_read_as_the_simulator_reads_them(file: str) -> None:
    found = Builder(Source(source.read(file)), checked=True).index.kernels
    read = source.signatures(file)
    instances = {name: s for s in read.values() for name in s.instances}
    assert sorted(instances) == sorted(found)
    for name, kernel in found.items():
        buffers = [(p["name"], int(p["index"])) for p in kernel["parameters"]]
        assert [(p.name, p.index) for p in instances[name].parameters] == buffers
        assert instances[name].threadgroup_bytes_of(name) <= 32 * 1024


def test_reading_needs_neither_numpy_nor_a_compiler() -> None:
    heavy = {"numpy", "subprocess", "ctypes"}
    code = f"import sys, mslsim.signature; print({heavy} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "set()\n"
