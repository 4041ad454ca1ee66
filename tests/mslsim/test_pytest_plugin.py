# SPDX-License-Identifier: MIT
"""The fixture for tests of anybody's kernels."""

import numpy as np
import pytest

from mslsim.pytest_plugin import mslsim_launch, ragged_sizes

assert mslsim_launch

SCALE = """#include <metal_stdlib>
using namespace metal;
kernel void scale(device float* x [[buffer(0)]], constant uint& n [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) { if (GUARD) x[i] = BY * x[i]; }
"""


def make(n, generator):
    return [generator.standard_normal(n).astype(np.float32), np.uint32(n)]


def twice(x, n):
    return {0: 2 * x}


def test_a_right_kernel_passes(mslsim_launch):
    mslsim_launch(SCALE, "scale", make, twice, defines={"GUARD": "i < n", "BY": 2})


def test_a_kernel_that_misses_ragged_sizes_fails(mslsim_launch):
    with pytest.raises(AssertionError, match=r"(?s)n = 1:.*bounds in scale"):
        mslsim_launch(SCALE, "scale", make, twice, defines={"GUARD": "true", "BY": 2})


def test_a_wrong_result_fails(mslsim_launch):
    with pytest.raises(AssertionError, match="argument 0, n = 1"):
        mslsim_launch(SCALE, "scale", make, twice, defines={"GUARD": "i < n", "BY": 3})


def test_ragged_sizes_come_first():
    sizes = ragged_sizes(64, np.random.default_rng(0))
    assert sizes[:4] == [1, 63, 65, 64] and all(2 <= n < 320 for n in sizes[4:])
