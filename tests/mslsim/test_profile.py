# SPDX-License-Identifier: MIT
"""Counts of kernels whose instructions can be told by reading them."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import mslsim
from mslsim.cli import app
from mslsim.profiling import costs

HEAD = """#include <metal_stdlib>
using namespace metal;
"""
KNOWN = """kernel void known(
    device const float4* x [[buffer(0)]],
    device float4* y [[buffer(1)]],
    constant uint& n [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
  float4 v = x[i];
  for (uint k = 0; k < n; ++k) {
    v = fma(v, v, v);
  }
  v = exp2(v);
  y[i] = v / v.wzyx;
}
"""


def profiled(body: str, *args: object, threads: int = 64, group: int = 32) -> mslsim.Profile:
    name = body.split("(")[0].split()[-1]
    return mslsim.profile(HEAD + body, name, args, threads, group)


def counts(profile: mslsim.Profile) -> dict[str, float]:
    return {name: slots / max(costs()[name]) for name, slots in profile.classes.items()}


def by_line(profile: mslsim.Profile) -> dict[int, float]:
    return {line - 2: slots for (_, line), slots in profile.lines.items()}


def test_a_kernel_with_known_counts():
    x = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
    y = np.zeros_like(x)
    profile = profiled(KNOWN, x, y, np.uint32(3))
    found = counts(profile)
    assert found["float"] == 3 * 4
    assert found["exp2"] == 4
    assert found["divide"] == 4
    assert found["memory"] == 2
    assert not {"long_add", "integer_multiply", "convert"} & set(found)
    lines = by_line(profile)
    assert lines[6] == 1
    assert lines[8] == 12
    assert lines[10] == 4 * max(costs()["exp2"])
    assert lines[11] == 1 + 4 * 32
    assert sum(lines.values()) == pytest.approx(profile.slots)
    assert profile.moved == profile.needed == 2 * x.nbytes
    assert profile.lines_per_access == pytest.approx((4 + 4 + 1) / 3)


def test_the_result_is_right_and_counted_once():
    """The kernel is run twice for its counts: what it changes in place is changed once."""
    body = """kernel void twice(device float* x [[buffer(0)]],
                                 uint i [[thread_position_in_grid]]) { x[i] *= 2; }"""
    x = np.arange(64, dtype=np.float32)
    first = profiled(body, x)
    np.testing.assert_array_equal(x, 2 * np.arange(64))
    mslsim.profile(HEAD + body, "twice", [x], 64, 32, restore=True)
    np.testing.assert_array_equal(x, 2 * np.arange(64))
    assert profiled(body, x).classes == first.classes == {"memory": 2, "float": 1}


def test_a_branch_of_one_lane_costs_the_whole_simdgroup():
    body = """kernel void branch(device float* x [[buffer(0)]],
        uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
      if (lane == 5) {
        x[i] = 1 / x[i] * 3;
      }
    }"""
    profile = profiled(body, np.ones(64, np.float32))
    assert counts(profile)["reciprocal"] == 1
    assert profile.lanes_used < 0.2


def test_indices_of_64_bits_cost_more():
    body = """kernel void at(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
        constant {0}& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {{
      const {0} row = {0}(i) / n;
      y[i] = x[row];
    }}"""
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    short = profiled(body.format("uint"), x, y, np.uint32(8))
    long = profiled(body.format("long"), x, y, np.int64(8))
    assert counts(short)["integer_divide"] == 1
    assert counts(long)["long_divide"] == 1
    assert long.slots > 10 * short.slots


def test_what_is_the_same_for_all_threads_is_free():
    body = """kernel void same(device float* x [[buffer(0)]], constant long& a [[buffer(1)]],
        constant long& b [[buffer(2)]], uint i [[thread_position_in_grid]]) {
      x[i] = float(a / b);
    }"""
    assert counts(profiled(body, np.zeros(64, np.float32), 7, 2)) == {"memory": 1}


def test_accesses_side_by_side_are_one():
    body = """kernel void four(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
        uint i [[thread_position_in_grid]]) {
      x += 4 * i;
      for (int k = 0; k < 4; ++k) {
        y[k * 64 + i] = x[k];
      }
    }"""
    x, y = np.ones(256, np.float32), np.zeros(256, np.float32)
    assert counts(profiled(body, x, y))["memory"] == 1 + 4


def test_one_over_a_root_is_one_instruction():
    body = """kernel void root(device float* x [[buffer(0)]],
        uint i [[thread_position_in_grid]]) { x[i] = precise::rsqrt(x[i]); }"""
    assert counts(profiled(body, np.ones(64, np.float32))) == {"memory": 2, "rsqrt": 1}


def test_an_array_in_memory_is_counted():
    body = """kernel void pick(device float* x [[buffer(0)]], constant uint& n [[buffer(1)]],
        uint i [[thread_position_in_grid]]) {
      float kept[4] = {x[0], x[1], x[2], 0};
      x[i] = kept[(n + i) & 3];
    }"""
    found = counts(profiled(body, np.ones(64, np.float32), np.uint32(2)))
    assert found["thread_memory"] >= 2


def test_operations_of_simdgroups():
    body = """kernel void simd(device float* x [[buffer(0)]],
        uint i [[thread_position_in_grid]]) {
      threadgroup float shared[32];
      float v = simd_sum(x[i]);
      v += simd_shuffle_xor(v, 1);
      shared[i % 32] = v;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      x[i] = shared[31 - i % 32] + quad_max(v) + (simd_any(v > 3) ? 1 : 0);
    }"""
    found = counts(profiled(body, np.ones(64, np.float32)))
    assert found["simd_reduce"] == found["quad_reduce"] == found["shuffle"] == 1
    assert found["ballot"] == found["barrier"] == 1
    assert (found["memory"], found["threadgroup_memory"]) == (2, 2)
    assert "thread_memory" not in found


def test_a_product_of_matrices_is_one_instruction():
    body = """kernel void product(device float* a [[buffer(0)]], device float* b [[buffer(1)]]) {
      simdgroup_float8x8 x, y, z;
      simdgroup_load(x, a, 8);
      simdgroup_load(y, b, 8);
      simdgroup_multiply(z, x, y);
      simdgroup_store(z, b, 8);
    }"""
    a, b = np.eye(8, dtype=np.float32), np.ones((8, 8), np.float32)
    profile = profiled(body, a, b, threads=32)
    assert counts(profile)["matrix_product"] == 1
    assert profile.work.products == 1
    assert set(counts(profile)) == {"matrix_product", "memory"}


def test_a_function_is_shown_at_its_lines_and_where_it_is_called():
    body = """inline float twice_exp(float v) {
  return exp2(v) + exp2(2 * v);
}
kernel void calls(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = twice_exp(x[i]);
}
"""
    profile = mslsim.profile(HEAD + body, "calls", [np.ones(64, np.float32)], 64, 32)
    own = {line: slots for (_, line), slots in profile.lines.items()}
    called = {line: slots for (_, line), slots in profile.called.items()}
    assert own[4] == called[4] == 10
    assert own[7] == 2
    assert called[7] == 12


SPEC = """kernel = "known"
threads = [64]
group_size = [32]
[[arguments]]
shape = [64, 4]
[[arguments]]
shape = [64, 4]
fill = "none"
[[arguments]]
value = 3
type = "uint32"
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    kernel, spec = tmp_path / "known.metal", tmp_path / "launch.toml"
    kernel.write_text(HEAD + KNOWN)
    spec.write_text(SPEC)
    return kernel, spec


def invoke(*arguments: object):
    return CliRunner().invoke(app, ["profile", *map(str, arguments)])


def test_the_command_names_the_hottest_line(files):
    kernel, spec = files
    result = invoke(kernel, "--spec", spec, "--chip", "M1", "--chip", "m2 max")
    assert result.exit_code == 0
    words = " ".join(result.output.split())
    assert "known: 64 threads in 2 groups of 32" in words
    assert "129.0 78.2% known.metal:13 y[i] = v / v.wzyx;" in words
    assert "M2 Max" in words
    assert "no estimate: latency-bound" in words


def test_json_and_comparison(files, tmp_path):
    kernel, spec = files
    old = tmp_path / "old.metal"
    old.write_text(HEAD + KNOWN.replace("k < n", "k < 2 * n"))
    result = invoke(kernel, "--spec", spec, "--compare", old, "--json", "--chip", "all")
    found = json.loads(result.output)
    assert found["slots"] == 165
    assert found["lines"][0] == {"file": str(kernel), "line": 13, "slots": 129}
    assert [e["chip"] for e in found["estimates"]][:3] == ["M1", "M1 Pro", "M1 Max"]
    assert found["ratios"]["slots"] == pytest.approx(165 / (165 + 3 * (4 + 2)))
    assert found["ratios"]["bytes moved"] == 1
    assert found["ratios"]["time on M1"] is None
    told = invoke(kernel, "--spec", spec, "--compare", old).output
    assert "slots                0.90" in told


def test_the_page_shows_the_source_with_its_heat(files, tmp_path):
    kernel, spec = files
    page = tmp_path / "page.html"
    assert invoke(kernel, "--spec", spec, "--html", page).exit_code == 0
    text = page.read_text()
    assert "<span>  y[i] = v / v.wzyx;</span>" in text
    assert '<i class="hot" style="--h:0.85">129.0</i>' in text
    assert '<td class="t">M4 Pro</td>' in text
    assert "http" not in text


@pytest.mark.parametrize(
    "change, chip, message",
    [
        (("known", "unknown"), "M1", "no kernel 'unknown'; there are ['known']"),
        (("[64, 4]", "[64, 4]"), "M9", "no chip 'M9'; there are M1"),
        (("[32]", "[2048]"), "M1", "known.metal:3: error: a threadgroup has at most"),
    ],
)
def test_errors_are_one_line(files, change, chip, message):
    kernel, spec = files
    spec.write_text(SPEC.replace(*change))
    result = invoke(kernel, "--spec", spec, "--chip", chip)
    assert result.exit_code == (1 if "error: " in message else 2)
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
