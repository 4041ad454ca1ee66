# SPDX-License-Identifier: MIT
"""Launches of det."""

import torch
from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import MSL_TYPE, Call, Launch, Planned, metal_kernel
from metalcore.metal.linalg import lu

FILE = "linalg/det.metal"


@metal_kernel("det")
def plan(policy: Values, A: Tensor) -> Planned | None:
    if A.dtype not in MSL_TYPE:
        return None
    *batch, n, _ = A.shape
    if A.numel() == 0:
        # the product of no pivots is one
        one = A.new_ones(batch)
        return [], (one, one.clone(), A.new_zeros(batch))
    steps, found = lu.factor(A.float().contiguous().view(-1, n, n))
    det, sign, logabsdet = (A.new_empty(batch, dtype=torch.float32) for _ in range(3))
    threads = policy["threads"]
    steps.append(
        Launch(
            FILE,
            "det_of_factors",
            "float",
            (found.rows, found.U, det, sign, logabsdet, n),
            threads=(det.numel() * threads, 1, 1),
            group=(threads, 1, 1),
        )
    )
    if A.dtype == torch.float32:
        return steps, (det, sign, logabsdet)
    rounded = tuple(torch.empty_like(x, dtype=A.dtype) for x in (det, sign, logabsdet))
    steps += [Call(r.copy_, (x,)) for r, x in zip(rounded, (det, sign, logabsdet), strict=True)]
    return steps, rounded
