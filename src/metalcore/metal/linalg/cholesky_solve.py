# SPDX-License-Identifier: MIT
"""Programs of cholesky_solve."""

from metalcore.metal.linalg import trsm
from metalcore.metal.linalg._matrices import as_right_sides, matrices
from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import Arguments, Buffer, Program

FILE = "linalg/cholesky_solve.metal"


@metal_kernel("cholesky_solve")
def plan(p: Program, a: Arguments) -> Buffer:
    B, lower = a.B, not a.upper
    if B.numel == 0:
        return p.new_like(B)
    L, X = matrices(p, a.L), p.new(B.shape)
    x = matrices(p, X)
    batch, n, k = x.shape
    if n <= trsm.BLOCK:
        kernel, variant, threads, group = trsm.share("cholesky_solve", batch, n, k)
        args = (L, matrices(p, B), x, batch, n, k)
        p.launch(FILE, f"cholesky_solve_{kernel}", (*variant, a.upper), args, threads, group)
    else:
        p.copy(X, B)
        trsm.in_place(p, L, x, trsm.Kind(lower, transpose=a.upper))
        trsm.in_place(p, L, x, trsm.Kind(lower, transpose=lower))
    return as_right_sides(p, X, B)
