# SPDX-License-Identifier: MIT
"""Memory that nobody wrote: marked once, followed from launch to launch."""

from typing import Any

import numpy as np
import pytest
import torch

import mslsim

TEXT = """
kernel void fill(device float* y [[buffer(0)]], constant long& step [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  y[i * step] = 1;
}
kernel void add(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                uint i [[thread_position_in_grid]]) {
  y[i] = x[i] + 1;
}
"""
KINDS = [np.empty, torch.empty]


def empty(kind: Any, size: int) -> Any:
    return kind(size, dtype=np.float32 if kind is np.empty else torch.float32)


@pytest.fixture(scope="module")
def library() -> mslsim.Library:
    return mslsim.compile_shader(TEXT)


@pytest.mark.parametrize("kind", KINDS)
def test_reading_what_nobody_wrote_is_found(kind: Any, library: mslsim.Library) -> None:
    x, y = empty(kind, 8), empty(kind, 8)
    with pytest.raises(mslsim.KernelError, match=r"uninitialized in add: read .* of x"):
        library.add(mslsim.uninitialized(x), y, threads=8)
    library.add(x, mslsim.uninitialized(y), threads=8)


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_launch_writes_the_next_may_read(kind: Any, library: mslsim.Library) -> None:
    x, y = mslsim.uninitialized(empty(kind, 8)), empty(kind, 8)
    library.fill(x, 1, threads=4)
    assert not x.is_written()
    library.add(x, y, threads=4)
    with pytest.raises(mslsim.KernelError, match="uninitialized"):
        library.add(x, y, threads=5)
    library.fill(x, 1, threads=8)
    assert x.is_written()
    library.add(x, y, threads=8)
    assert y.tolist() == [2] * 8


@pytest.mark.parametrize("kind", KINDS)
def test_views_share_what_is_known(kind: Any, library: mslsim.Library) -> None:
    whole = mslsim.uninitialized(empty(kind, 8))
    odd = whole.view(whole.array[1::2])
    library.fill(odd, 2, threads=4)
    assert odd.is_written()
    assert not whole.is_written()
    assert whole.written.tolist() == ([0] * 4 + [1] * 4) * 4
    library.fill(whole, 2, threads=4)
    assert whole.is_written()


def test_only_the_view_that_is_marked_is_unwritten(library: mslsim.Library) -> None:
    x, y = np.zeros(8, np.float32), np.zeros(8, np.float32)
    mark = mslsim.uninitialized(x[4:])
    library.add(mark.view(x), y, threads=4)
    with pytest.raises(mslsim.KernelError, match="uninitialized"):
        library.add(mark.view(x), y, threads=5)
    mark.note_written()
    library.add(mark.view(x), y, threads=8)


def test_memory_is_marked_once(library: mslsim.Library) -> None:
    x = np.zeros(8, np.float32)
    first, second = mslsim.uninitialized(x[:4]), mslsim.uninitialized(x[4:])
    with pytest.raises(ValueError, match="argument 1 lies in memory that another argument marks"):
        library.add(first, second, threads=4)
    second = first.view(x[4:])
    library.add(second, first, threads=4)
    assert first.is_written()


def test_an_unchecked_launch_counts_as_writing_all() -> None:
    x = mslsim.uninitialized(torch.empty(8))
    mslsim.compile_shader(TEXT, "none").fill(x, 1, threads=4)
    assert x.is_written()


def test_the_grid_is_that_of_a_marked_tensor(library: mslsim.Library) -> None:
    x = mslsim.uninitialized(torch.empty(8))
    library.fill(x, 1)
    assert x.array.tolist() == [1] * 8


SCAN = """#include <metal_stdlib>
using namespace metal;
kernel void totals(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                   uint t [[thread_position_in_threadgroup]], uint n [[threads_per_threadgroup]]) {
  threadgroup float sums[32];
  const float mine = simd_sum(x[t]);
  if (t % 32 == 0) sums[t / 32] = mine;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float before = simd_prefix_exclusive_sum(sums[t % 32]);
  if (t % 32 < USED) y[t % 32] = before;
}
"""


@pytest.mark.parametrize("used, is_note", [(2, True), (3, True), (4, False)])
def test_what_reaches_no_result_is_a_note(used: int, is_note: bool) -> None:
    """Of 32 sums two are written, and a prefix sum is taken: its first three are of these."""
    x, y = np.ones(64, np.float32), np.zeros(32, np.float32)
    report = mslsim.run(SCAN, "totals", [x, y], 64, 64, defines={"USED": used})
    found = report.notes if is_note else report.findings
    assert [(f.kind, f.line, f.is_note) for f in found] == [("uninitialized", 9, is_note)]
    assert report.ok == is_note
    assert ("no result depends on it" in found[0].message) == is_note
    if is_note:
        assert y[:3].tolist() == [0, 32, 64][:used] + [0] * (3 - used)


def test_a_buffer_that_nobody_wrote_may_be_read_and_thrown_away() -> None:
    text = """
kernel void pick(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                 constant uint& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  const float v = x[i];
  y[i] = i < n ? v : 7;
}"""
    x = mslsim.uninitialized(np.ones(8, np.float32))
    mslsim.compile_shader(TEXT).fill(x, 1, threads=4)
    y = mslsim.uninitialized(np.zeros(16, np.float32))
    for n, is_ok in ((4, True), (5, False)):
        report = mslsim.run(text, "pick", [x, y, np.uint32(n)], 8, 8)
        assert report.ok == is_ok, str(report)
