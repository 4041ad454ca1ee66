# SPDX-License-Identifier: MIT
"""Programs of kl_div and kl_div_backward."""

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import Arguments, Buffer, Program
from metalcore.metal.train import _divergence

FILE = "train/kl_div.metal"
_KIND = {False: "kl_div", True: "kl_div_log_target"}


@metal_kernel("kl_div")
def forward(p: Program, a: Arguments) -> Buffer:
    return _divergence.forward(p, a, FILE, _KIND[a.log_target], 0.0)


@metal_kernel("kl_div_backward")
def backward(p: Program, a: Arguments) -> tuple[Buffer, Buffer]:
    return _divergence.backward(p, a, FILE, _KIND[a.log_target], 0.0)
