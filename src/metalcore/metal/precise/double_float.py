# SPDX-License-Identifier: MIT
"""Programs of double_float."""

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import Arguments, Buffer, Program, round_up

FILE = "precise/double_float.metal"
KERNELS = {
    "add": ("double_float_of_two", ("addition",)),
    "sub": ("double_float_of_two", ("subtraction",)),
    "mul": ("double_float_of_two", ("multiplication",)),
    "div": ("double_float_of_two", ("division",)),
    "fma": ("double_float_fma", ()),
    "sqrt": ("double_float_of_one", ("square_root",)),
    "exp": ("double_float_of_one", ("exponential",)),
    "log": ("double_float_of_one", ("logarithm",)),
}


@metal_kernel("double_float")
def plan(p: Program, a: Arguments) -> tuple[Buffer, Buffer]:
    high, low = p.new_like(a.x), p.new_like(a.x)
    if a.x.numel:
        pairs = (a.x, a.x_low, a.y, a.y_low, a.z, a.z_low)
        given = [p.dense(b) for b in pairs if b is not None]
        kernel, variant = KERNELS[a.function]
        n, threads = a.x.numel, p.policy["threads"]
        p.launch(FILE, kernel, variant, (*given, high, low, n), round_up(n, threads), threads)
    return high, low
