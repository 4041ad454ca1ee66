# SPDX-License-Identifier: MIT
"""Programs of jsd and jsd_backward."""

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import Arguments, Buffer, Program
from metalcore.metal.train import _divergence

FILE = "train/jsd.metal"


@metal_kernel("jsd")
def forward(p: Program, a: Arguments) -> Buffer:
    return _divergence.forward(p, a, FILE, "jsd", a.beta)


@metal_kernel("jsd_backward")
def backward(p: Program, a: Arguments) -> tuple[Buffer, Buffer]:
    return _divergence.backward(p, a, FILE, "jsd", a.beta)
