# SPDX-License-Identifier: MIT
"""Programs of det."""

from metalcore.metal.linalg import lu
from metalcore.metal.linalg._matrices import matrices
from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import Arguments, Buffer, Program

FILE = "linalg/det.metal"


@metal_kernel("det")
def plan(p: Program, a: Arguments) -> tuple[Buffer, ...]:
    A = a.A
    results = tuple(p.new(A.shape[:-2]) for _ in ("det", "sign", "logabsdet"))
    if A.numel == 0:
        # the product of no pivots is one
        for result, value in zip(results, (1.0, 1.0, 0.0), strict=True):
            p.fill(result, value)
    else:
        _of_pivots(p, matrices(p, A), results)
    return tuple(p.rounded(x, A.dtype) for x in results)


def _of_pivots(p: Program, A: Buffer, results: tuple[Buffer, ...]) -> None:
    batch, n, _ = A.shape
    share = lu.in_simdgroups(batch, n)
    if share is not None:
        p.launch(FILE, "det_simdgroup", share.variant, (A, *results, batch, n), *share[1:])
    elif n <= lu.THREADGROUP_ROWS:
        threads = lu.THREADGROUP_ROWS
        p.launch(FILE, "det_threadgroup", (), (A, *results, n), batch * threads, threads)
    else:
        rows, _, U, _ = lu.factor(p, A)
        threads = p.policy["threads"]
        p.launch(FILE, "det_of_factors", (), (rows, U, *results, n), batch * threads, threads)
