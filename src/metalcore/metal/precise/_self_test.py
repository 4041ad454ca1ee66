# SPDX-License-Identifier: MIT
"""Whether sums of two floats are error-free on a device: asked once, before the first of them.

Metal lets a GPU round toward zero, and a compiler fuse products with sums where it is not told not
to. Either would make the low parts of sums rubbish.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metalcore.metal.source import Compiler

_KERNEL = """
kernel void self_test(
    device const float* x [[buffer(0)]],
    device const float* y [[buffer(1)]],
    device float* found [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
  const two_floats sum = two_sum(x[i], y[i]);
  const two_floats product = two_product(x[i], y[i]);
  const two_floats both = accumulated({y[i], 0.0f}, x[i], y[i]);
  found[6 * i] = sum.high;
  found[6 * i + 1] = sum.low;
  found[6 * i + 2] = product.high;
  found[6 * i + 3] = product.low;
  found[6 * i + 4] = both.high;
  found[6 * i + 5] = both.low;
}
"""


def text() -> str:
    header = Path(__file__).parent.parent / "include" / "float_pairs.h"
    return header.read_text().replace("#pragma once\n", "") + _KERNEL


def _pairs() -> tuple[Tensor, Tensor]:
    """Sums and products that are rounded, up and down, of any signs."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(2, 256, generator=generator) + 0.5
    signs = torch.randint(0, 2, (2, 256), generator=generator) * 2 - 1
    return x * signs[0], torch.ldexp(y, torch.arange(256) % 24 - 12) * signs[1]


def is_error_free(compiler: Compiler, device: torch.device, source: str | None = None) -> bool:
    """Run the test: `compiler` makes a library of a kernel's text."""
    x, y = _pairs()
    found = torch.zeros(len(x), 6, device=device)
    kernel: Any = compiler(source or text()).self_test
    kernel(x.to(device), y.to(device), found, threads=len(x), group_size=32)
    high, low = found.cpu().double().view(-1, 3, 2).unbind(-1)
    a, b = x.double(), y.double()
    # the low parts of the last one are added up in float32
    exact = torch.stack((a + b, a * b), -1)
    nearest = torch.stack((x + y, x * y), -1).double()
    is_exact = torch.equal((high + low)[:, :2], exact) and torch.equal(high[:, :2], nearest)
    off = (high + low)[:, 2] - (a * b + b)
    return is_exact and bool((off.abs() <= 2.0**-44 * (a * b).abs().maximum(b.abs())).all())


@cache
def expect_error_free() -> None:
    """Raise where sums of two floats are not what they should be on the GPU of this machine."""
    if not is_error_free(torch.mps.compile_shader, torch.device("mps")):
        raise RuntimeError(
            "metalcore.precise: sums of two floats are not error-free on this GPU (it rounds or "
            'fuses otherwise than IEEE 754 says); use level="exact", which needs integers alone'
        )
