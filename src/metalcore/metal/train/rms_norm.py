# SPDX-License-Identifier: MIT
"""Launches of rms_norm and rms_norm_backward."""

from dataclasses import dataclass

import torch
from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import (
    MAX_THREADS_PER_GROUP,
    MSL_TYPE,
    SIMD_WIDTH,
    Launch,
    Planned,
    metal_kernel,
    round_up,
)

FILE = "train/rms_norm.metal"


@dataclass(frozen=True)
class RowLayout:
    """How `lanes` threads share a row of `chunks` of `width` values: `keep` chunks each.

    The kernels are built for a keep of 1 and 4, and of 0 for rows that do not fit.
    """

    width: int
    chunks: int
    keep: int
    lanes: int

    def variant(self, x: Tensor, weight: Tensor) -> str:
        return f"{MSL_TYPE[x.dtype]}_{MSL_TYPE[weight.dtype]}_{self.width}x{self.keep}"


def layout(n: int, tensors: tuple[Tensor, ...], threads: int) -> RowLayout:
    """Rows of n shared by about `threads` threads; keep is 0 where they cannot hold the row."""
    width = 4 if n % 4 == 0 and all(t.storage_offset() % 4 == 0 for t in tensors) else 1
    chunks = n // width
    for keep, limit in ((1, SIMD_WIDTH), (4, threads), (4, MAX_THREADS_PER_GROUP)):
        lanes = round_up(max(1, -(-chunks // keep)), SIMD_WIDTH)
        if lanes <= limit:
            return RowLayout(width, chunks, keep, lanes)
    return RowLayout(width, chunks, 0, MAX_THREADS_PER_GROUP)


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
    row = layout(x.shape[-1], (x, w), policy["threads"])
    if row.lanes == SIMD_WIDTH:
        # short runs leave no thread idle, long ones read the weight less often
        run = min(policy["rows_per_simdgroup"], max(1, rows * SIMD_WIDTH // policy["busy_threads"]))
        simdgroups = -(-rows // run)
        group = SIMD_WIDTH * min(policy["simdgroups"], simdgroups)
        launch = Launch(
            FILE,
            "rms_norm_simdgroup",
            row.variant(x, w),
            (x, w, y, rstd, rows, run, row.chunks, eps, weight_offset, has_weight),
            threads=(round_up(simdgroups * SIMD_WIDTH, group), 1, 1),
            group=(group, 1, 1),
        )
    else:
        launch = Launch(
            FILE,
            "rms_norm",
            row.variant(x, w),
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

    row = layout(n, (dy, x, w, add), policy["threads"])
    rows_per_block = -(-rows // max(1, policy["busy_threads"] // row.lanes))
    blocks = -(-rows // rows_per_block)
    has_share = int(dweight.numel() > 0)
    share = x.new_empty((blocks, n) if has_share else 4, dtype=torch.float32)
    launches = [
        Launch(
            FILE,
            "rms_norm_backward",
            row.variant(x, w),
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
