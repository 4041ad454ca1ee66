# SPDX-License-Identifier: MIT
"""Launches of rms_norm and rms_norm_backward."""

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
from metalcore.metal.train._rows import RowShare

FILE = "train/rms_norm.metal"


def kernel_weight(x: Tensor, weight: Tensor | None) -> Tensor:
    """The weight as kernels take it: in x's dtype or float32; x itself where there is none."""
    if weight is None:
        return x
    return weight.contiguous() if weight.dtype == x.dtype else weight.float().contiguous()


@metal_kernel("rms_norm")
def plan_forward(
    policy: Values, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float
) -> Planned | None:
    if x.dtype not in MSL_TYPE:
        return None
    x = x.contiguous()
    w = kernel_weight(x, weight)
    y, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    rows, has_weight = rstd.numel(), int(weight is not None)
    if x.numel() == 0:
        return [], (y, rstd.fill_(float("nan")))
    row = RowShare.of(x.shape[-1], (x, w), policy)
    if row.lanes == SIMD_WIDTH:
        # short runs leave no thread idle, long ones read the weight less often
        run = min(policy["rows_per_simdgroup"], max(1, rows * SIMD_WIDTH // policy["busy_threads"]))
        simdgroups = -(-rows // run)
        group = SIMD_WIDTH * min(policy["simdgroups"], simdgroups)
        launch = Launch(
            FILE,
            "rms_norm_simdgroup",
            row.variant(x.dtype, w.dtype),
            (x, w, y, rstd, rows, run, row.chunks, eps, weight_offset, has_weight),
            threads=(round_up(simdgroups * SIMD_WIDTH, group), 1, 1),
            group=(group, 1, 1),
        )
    else:
        launch = Launch(
            FILE,
            "rms_norm",
            row.norm_variant(x.dtype, w.dtype),
            (x, w, y, rstd, row.chunks, eps, weight_offset, has_weight),
            threads=(rows * row.lanes, 1, 1),
            group=(row.lanes, 1, 1),
        )
    return [launch], (y, rstd)


@metal_kernel("rms_norm_backward")
def plan_backward(
    policy: Values,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
    dsum: Tensor | None,
    need_dweight: bool,
) -> Planned | None:
    if x.dtype not in MSL_TYPE:
        return None
    dy, x, rstd = dy.contiguous(), x.contiguous(), rstd.contiguous()
    add = x if dsum is None else dsum.contiguous()
    w = kernel_weight(x, weight)
    n, rows = x.shape[-1], rstd.numel()
    dx = torch.empty_like(x)
    if weight is None or not need_dweight:
        dweight = dy.new_empty(0)
    else:
        dweight = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return [], (dx, dweight)

    row = RowShare.of(n, (dy, x, w, add), policy)
    rows_per_block = -(-rows // max(1, policy["busy_threads"] // row.lanes))
    blocks = -(-rows // rows_per_block)
    has_share = int(dweight.numel() > 0)
    share = x.new_empty((blocks, n) if has_share else 4, dtype=torch.float32)
    launches = [
        Launch(
            FILE,
            "rms_norm_backward",
            row.variant(x.dtype, w.dtype),
            (
                *(dy, x, w, rstd, add, dx, share, rows, rows_per_block, row.chunks, weight_offset),
                *(int(weight is not None), int(dsum is not None), has_share),
            ),
            threads=(blocks * row.lanes, 1, 1),
            group=(row.lanes, 1, 1),
        )
    ]
    if has_share:
        launches.append(
            Launch(
                FILE,
                "rms_norm_dweight",
                MSL_TYPE[dweight.dtype],
                (share, dweight, blocks, n),
                threads=(round_up(n, policy["threads"]), 1, 1),
                group=(policy["threads"], 1, 1),
            )
        )
    return launches, (dx, dweight)
