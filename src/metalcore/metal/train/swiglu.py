# SPDX-License-Identifier: MIT
"""Programs of swiglu and swiglu_backward."""

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import Arguments, Buffer, Program
from metalcore.metal.train._elementwise import elementwise


@metal_kernel("swiglu")
def forward(p: Program, a: Arguments) -> Buffer:
    return elementwise(p, "swiglu", (a.gate, a.up))[0]


@metal_kernel("swiglu_backward")
def backward(p: Program, a: Arguments) -> tuple[Buffer, ...]:
    return elementwise(p, "swiglu_backward", (a.dy, a.gate, a.up), outputs=2)
