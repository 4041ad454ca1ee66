# SPDX-License-Identifier: MIT
"""Programs of double_float."""

from typing import Any

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import Arguments, Program, round_up

FILE = "precise/double_float.metal"
KERNELS = {
    "add": ("double_float_of_two", ("addition",), 2),
    "sub": ("double_float_of_two", ("subtraction",), 2),
    "mul": ("double_float_of_two", ("multiplication",), 2),
    "div": ("double_float_of_two", ("division",), 2),
    "fma": ("double_float_fma", (), 3),
    "sqrt": ("double_float_of_one", ("square_root",), 1),
    "exp": ("double_float_of_one", ("exponential",), 1),
    "log": ("double_float_of_one", ("logarithm",), 1),
}
"""Kernel, its function, and of how many numbers that is."""


@metal_kernel("double_float")
def plan(p: Program, a: Arguments) -> Any:
    kernel, variant, operands = KERNELS[a.function]
    pairs = [a.x, a.x_low, a.y, a.y_low, a.z, a.z_low]
    needed = pairs[: 2 * operands]
    if None in needed or pairs[2 * operands :] != [None] * (6 - 2 * operands):
        return NotImplemented
    high, low = p.new_like(a.x), p.new_like(a.x)
    if a.x.numel:
        n, threads = a.x.numel, p.policy["threads"]
        args = (*map(p.dense, needed), high, low, n)
        p.launch(FILE, kernel, variant, args, round_up(n, threads), threads)
    return high, low
