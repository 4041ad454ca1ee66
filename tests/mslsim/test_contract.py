# SPDX-License-Identifier: MIT
"""Results that must not depend on which products and sums a compiler fuses."""

import numpy as np
import pytest
import torch

import metalcore
import mslsim
from metalcore import precise

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
PRAGMA = "#pragma METAL fp contract(off)\n"
# What an addition of a product loses, which is also used elsewhere.
LOST = """
inline float2 two_sum(float x, float y) {
  const float s = x + y;
  const float t = s - x;
  return float2(s, (x - (s - t)) + (y - t));
}
kernel void lost(
    device const float* a [[buffer(0)]], device float* o [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  const float product = a[0] * a[1];
  const float2 sum = two_sum(a[2], product);
  o[0] = sum.x + sum.y;
  o[1] = product;
}
"""


def _lost(source: str, contract: str, checks: str = "none") -> float:
    """The rounded product less itself."""
    a = np.array([1 + 2.0**-12, 1 + 2.0**-12, -(1 + 2.0**-11)], np.float32)
    out = np.ones(2, np.float32)
    library = mslsim.compile_shader(HEAD + source, checks, contract=contract)
    library.lost(a, out, threads=1, group_size=1)
    assert out[1] == -a[2]
    return float(out[0])


@pytest.mark.parametrize("checks", ["none", "all"])
def test_two_sum_without_the_pragma_is_found_out(checks: str) -> None:
    assert _lost(LOST, "on", checks) == 0
    assert _lost(LOST, "fast", checks) != 0
    assert _lost(PRAGMA + LOST, "fast", checks) == 0


def test_products_are_fused_on_either_side_of_a_difference() -> None:
    source = HEAD + (
        "kernel void k(device const float* a [[buffer(0)]], device float* o [[buffer(1)]]) {\n"
        "  const float p = a[0] * a[1]; o[0] = a[2] - p; o[1] = p - a[2]; o[2] = p; }\n"
    )
    a = np.array([1 + 2.0**-12, 1 + 2.0**-12, 1 + 2.0**-11], np.float32)
    out = np.zeros(3, np.float32)
    mslsim.compile_shader(source, "none", contract="fast").k(a, out, threads=1, group_size=1)
    assert out.tolist() == [-(2.0**-24), 2.0**-24, 1 + 2.0**-11]


def test_sums_of_two_floats_hold_where_all_is_fused() -> None:
    def fused(text: str) -> mslsim.Library:
        return mslsim.compile_shader(text, "none", contract="fast")

    x = torch.tensor([1 + 2.0**-12, 1.0, 3.0])
    y = torch.tensor([1 + 2.0**-12, -(1 + 2.0**-11), 2.0**-26])
    truth = (x.double() * y.double()).sum().float()
    with metalcore.simulate(compiler=fused):
        assert precise.dot(x, y) == truth


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="contract must be 'on', 'fast' or 'off', got 'all'"):
        mslsim.compile_shader(HEAD + LOST, contract="all")
