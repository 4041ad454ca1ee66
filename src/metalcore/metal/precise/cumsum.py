# SPDX-License-Identifier: MIT
"""Programs of precise_cumsum."""

from metalcore.metal.plans import metal_kernel
from metalcore.metal.precise._slices import EXACT, LIMB_THREADS
from metalcore.metal.program import MSL_TYPE, Arguments, Buffer, Program

FILE = "precise/cumsum.metal"


@metal_kernel("precise_cumsum")
def plan(p: Program, a: Arguments) -> Buffer:
    x = p.dense(a.x)
    y = p.new_like(x)
    if x.numel == 0:
        return y
    n = x.shape[-1]
    kernel, threads = "cumsum_pairs", p.policy["threads"]
    if a.level == EXACT:
        kernel, threads = "cumsum_limbs", LIMB_THREADS
    args = (x, y, n, -(-n // threads))
    p.launch(FILE, kernel, (MSL_TYPE[x.dtype],), args, x.numel // n * threads, threads)
    return y
