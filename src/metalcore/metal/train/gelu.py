# SPDX-License-Identifier: MIT
"""Programs of gelu, bias_gelu and their gradients."""

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import Arguments, Buffer, Program
from metalcore.metal.train._elementwise import with_bias

GELU = {False: "gelu_erf", True: "gelu_tanh"}
"""What kernels compute a GELU by, for the argument tanh."""


@metal_kernel("gelu")
def forward(p: Program, a: Arguments) -> Buffer:
    return with_bias(p, "gelu", (a.x,), None, (GELU[a.tanh],))


@metal_kernel("gelu_backward")
def backward(p: Program, a: Arguments) -> Buffer:
    return with_bias(p, "gelu_backward", (a.dy, a.x), None, (GELU[a.tanh],))


@metal_kernel("bias_gelu")
def bias_forward(p: Program, a: Arguments) -> Buffer:
    return with_bias(p, "gelu", (a.x,), a.bias, (GELU[a.tanh],))


@metal_kernel("bias_gelu_backward")
def bias_backward(p: Program, a: Arguments) -> Buffer:
    return with_bias(p, "gelu_backward", (a.dy, a.x), a.bias, (GELU[a.tanh],))
