# SPDX-License-Identifier: MIT
"""Programs of geglu and geglu_backward."""

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import Arguments, Buffer, Program
from metalcore.metal.train._elementwise import elementwise
from metalcore.metal.train.gelu import GELU


@metal_kernel("geglu")
def forward(p: Program, a: Arguments) -> Buffer:
    return elementwise(p, "geglu", (a.gate, a.up), variant=(GELU[a.tanh],))[0]


@metal_kernel("geglu_backward")
def backward(p: Program, a: Arguments) -> tuple[Buffer, ...]:
    inputs = (a.dy, a.gate, a.up)
    return elementwise(p, "geglu_backward", inputs, variant=(GELU[a.tanh],), outputs=2)
