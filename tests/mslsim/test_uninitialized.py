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
