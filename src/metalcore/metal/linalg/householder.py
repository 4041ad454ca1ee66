# SPDX-License-Identifier: MIT
"""Launches of householder_vector and apply_householder."""

import torch
from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import (
    MSL_TYPE,
    SIMD_WIDTH,
    Launch,
    Planned,
    metal_kernel,
    round_up,
)

FILE = "linalg/householder.metal"


@metal_kernel("householder_vector")
def plan_vector(policy: Values, x: Tensor) -> Planned | None:
    if x.dtype not in MSL_TYPE:
        return None
    x = x.contiguous()
    v, tau = torch.empty_like(x), x.new_empty(x.shape[:-1])
    if x.numel() == 0:
        return [], (v, tau)
    launch = Launch(
        FILE,
        "householder_vector",
        MSL_TYPE[x.dtype],
        (x, v, tau, tau.numel(), x.shape[-1]),
        threads=(round_up(tau.numel() * SIMD_WIDTH, policy["threads"]), 1, 1),
        group=(policy["threads"], 1, 1),
    )
    return [launch], (v, tau)


@metal_kernel("apply_householder")
def plan_apply(policy: Values, A: Tensor, v: Tensor, tau: Tensor, left: bool) -> Planned | None:
    if A.dtype not in MSL_TYPE:
        return None
    A, v, tau = A.contiguous(), v.contiguous(), tau.contiguous()
    Y = torch.empty_like(A)
    if A.numel() == 0:
        return [], Y
    m, n = A.shape[-2:]
    if left:
        group = min(policy["threads"], round_up(n, SIMD_WIDTH))
        launch = Launch(
            FILE,
            "apply_householder_left",
            MSL_TYPE[A.dtype],
            (A, v, tau, Y, m, n),
            threads=(round_up(n, group), tau.numel(), 1),
            group=(group, 1, 1),
        )
    else:
        rows = tau.numel() * m
        launch = Launch(
            FILE,
            "apply_householder_right",
            MSL_TYPE[A.dtype],
            (A, v, tau, Y, rows, m, n),
            threads=(round_up(rows * SIMD_WIDTH, policy["threads"]), 1, 1),
            group=(policy["threads"], 1, 1),
        )
    return [launch], Y
