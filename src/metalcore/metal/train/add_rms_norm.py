# SPDX-License-Identifier: MIT
"""Launches of add_rms_norm, out of place and in place."""

import torch
from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import MSL_TYPE, Launch, Planned, metal_kernel
from metalcore.metal.train._rows import RowShare
from metalcore.metal.train.rms_norm import kernel_weight

FILE = "train/add_rms_norm.metal"


@metal_kernel("add_rms_norm")
def plan_forward(
    policy: Values,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
) -> Planned | None:
    total = torch.empty_like(residual, memory_format=torch.contiguous_format)
    planned = _plan(policy, x, residual.contiguous(), weight, eps, weight_offset, total)
    if planned is None:
        return None
    launches, (y, rstd) = planned
    return launches, (y, total, rstd)


@metal_kernel("add_rms_norm_")
def plan_in_place(
    policy: Values,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
) -> Planned | None:
    if not residual.is_contiguous():
        return None
    return _plan(policy, x, residual, weight, eps, weight_offset, residual)


def _plan(
    policy: Values,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    total: Tensor,
) -> Planned | None:
    if x.dtype not in MSL_TYPE:
        return None
    x = x.contiguous()
    w = kernel_weight(x, weight)
    y, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    if x.numel() == 0:
        return [], (y, rstd.fill_(float("nan")))
    row = RowShare.of(x.shape[-1], (x, residual, w, total), policy)
    launch = Launch(
        FILE,
        "add_rms_norm",
        row.norm_variant(x.dtype, w.dtype),
        (x, residual, w, y, total, rstd, row.chunks, eps, weight_offset, int(weight is not None)),
        threads=(rstd.numel() * row.lanes, 1, 1),
        group=(row.lanes, 1, 1),
    )
    return [launch], (y, rstd)
