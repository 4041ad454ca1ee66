# SPDX-License-Identifier: MIT
"""Programs of silu, bias_silu and their gradients."""

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import Arguments, Buffer, Program
from metalcore.metal.train._elementwise import with_bias


@metal_kernel("silu")
def forward(p: Program, a: Arguments) -> Buffer:
    return with_bias(p, "silu", (a.x,), None)


@metal_kernel("silu_backward")
def backward(p: Program, a: Arguments) -> Buffer:
    return with_bias(p, "silu_backward", (a.dy, a.x), None)


@metal_kernel("bias_silu")
def bias_forward(p: Program, a: Arguments) -> Buffer:
    return with_bias(p, "silu", (a.x,), a.bias)


@metal_kernel("bias_silu_backward")
def bias_backward(p: Program, a: Arguments) -> Buffer:
    return with_bias(p, "silu_backward", (a.dy, a.x), a.bias)
