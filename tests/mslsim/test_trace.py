# SPDX-License-Identifier: MIT
"""One thread, step by step, and what kernels give to os_log."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import mslsim
from mslsim.cli import app

STEPS = """#include <metal_stdlib>
using namespace metal;
kernel void steps(device half4* x [[buffer(0)]], device atomic_uint* n [[buffer(1)]],
                  constant uint& turns [[buffer(2)]], uint2 at [[thread_position_in_grid]],
                  uint t [[thread_index_in_threadgroup]]) {
  threadgroup uint seen[4];
  seen[t] = at.x;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint s = seen[0];
  for (uint i = 0; i < turns; ++i) {
    if (i % 2 == at.x % 2)
      s += 3;
    else
      s *= 2;
  }
  if (s > 4)
    x[at.y * 5 + at.x] = half4(s);
  else
    atomic_fetch_add_explicit(n, 1, memory_order_relaxed);
}
"""


def traced(thread, turns=2):
    x, n = np.zeros((3, 5, 4), np.float16), np.zeros(1, np.uint32)
    report = mslsim.trace(STEPS, "steps", [x, n, np.uint32(turns)], (5, 3), (2, 2), thread)
    assert report.ok, str(report)
    return [(s.line, s.action, s.memory, s.byte, s.values) for s in report.steps]


def test_a_thread_is_followed_through_its_branches():
    steps = traced((4, 2))
    assert steps[0] == (7, "write", "threadgroup seen", 0, (4,))
    assert (8, "barrier", "", 0, ()) in steps
    assert (9, "read", "threadgroup seen", 0, (4,)) in steps
    assert [line for line, action, *_ in steps if action == "branch" and line in (12, 14)] == [
        12,
        14,
    ]
    # (4 + 3) * 2
    assert (17, "write", "x [[buffer(0)]]", 14 * 8, (14.0,) * 4) in steps


def test_another_thread_takes_another_way():
    steps = traced((0, 0), turns=0)
    assert [s[2] for s in steps if s[0] == 19 and s[1].startswith("atomic")] == ["n [[buffer(1)]]"]
    assert not any(line == 17 and action == "write" for line, action, *_ in steps)


def test_the_thread_must_exist():
    with pytest.raises(ValueError, match=r"inside of the grid \(5, 3, 1\), got \(5, 0, 0\)"):
        traced((5, 0))


LAUNCH = 'kernel = "steps"\nthreads = [5, 3]\ngroup_size = [2, 2]\n' + "".join(
    f"[[arguments]]\n{a}\n"
    for a in ('shape = [3, 5, 4]\ndtype = "float16"',
              'shape = [1]\ndtype = "uint32"\nfill = "zeros"', 'value = 2\ntype = "uint32"')
)  # fmt: skip


def test_the_command_lists_steps(tmp_path: Path):
    (tmp_path / "steps.metal").write_text(STEPS)
    (tmp_path / "launch.toml").write_text(LAUNCH)
    command = ["trace", str(tmp_path / "steps.metal"), "--spec", str(tmp_path / "launch.toml")]
    result = CliRunner().invoke(app, [*command, "--thread", "4,2"])
    assert result.exit_code == 0, result.output
    assert "steps.metal:17: write of byte 112 of x [[buffer(0)]] = 14, 14, 14, 14" in result.output
    result = CliRunner().invoke(app, [*command, "--thread", "4,2", "--json"])
    assert {s["action"] for s in json.loads(result.output)} >= {"read", "write", "branch"}
    assert CliRunner().invoke(app, [*command, "--thread", "a"]).exit_code == 2


LOG = """#include <metal_stdlib>
#include <metal_logging>
using namespace metal;
constant os_log mine("a", "b");
kernel void says(device float* x [[buffer(0)]], uint t [[thread_position_in_grid]]) {
  if (t == 1)
    os_log_default.log("x = %5.2f, t = %u %d %v2f 100%% %s", x[t], t, -3, float2(1, 2), "hi");
  if (t == 40) mine.log_error("bad %x", 255);
  x[t] = half(1);
}
"""


@pytest.mark.parametrize("checks", ["all", "none"])
def test_os_log_prints_who_said_it(checks, capsys):
    report = mslsim.run(LOG, "says", [np.full(64, 1.25, np.float32)], 64, 32, checks=checks)
    assert report.ok, str(report)
    assert report.log == [
        "source.metal:7: thread 1 of threadgroup 0: x =  1.25, t = 1 -3 1.000000,2.000000 100% hi",
        "source.metal:8: thread 8 of threadgroup 1: error: bad ff",
    ]
    assert capsys.readouterr().err.splitlines() == report.log
    again = mslsim.run(LOG, "says", [np.zeros(32, np.float32)], 1, 1, checks=checks)
    assert again.log == []


def test_a_long_log_says_what_is_lost():
    text = LOG.replace("t == 40", "t >= 0").replace("bad %x", "a line of some forty characters, %x")
    report = mslsim.run(text, "says", [np.zeros(4096, np.float32)], 4096, 256)
    assert len(report.log) > 900
    assert "lines are lost" in report.log[-1]
