# SPDX-License-Identifier: MIT
"""Programs of soft_cap and soft_cap_backward."""

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import Arguments, Buffer, Program
from metalcore.metal.train._elementwise import elementwise


@metal_kernel("soft_cap")
def forward(p: Program, a: Arguments) -> Buffer:
    return elementwise(p, "soft_cap", (a.x,), a.cap)[0]


@metal_kernel("soft_cap_backward")
def backward(p: Program, a: Arguments) -> Buffer:
    return elementwise(p, "soft_cap_backward", (a.dy, a.x), a.cap)[0]
