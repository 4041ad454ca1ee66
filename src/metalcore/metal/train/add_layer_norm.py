# SPDX-License-Identifier: MIT
"""The launch of add_layer_norm."""

import torch
from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import MSL_TYPE, Launch, Planned, metal_kernel
from metalcore.metal.train._rows import RowShare
from metalcore.metal.train.layer_norm import kernel_weights


@metal_kernel("add_layer_norm")
def plan_forward(
    policy: Values,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Planned | None:
    if x.dtype not in MSL_TYPE:
        return None
    x, residual = x.contiguous(), residual.contiguous()
    w, b, dtype = kernel_weights(x, weight, bias)
    y, total = torch.empty_like(x), torch.empty_like(x)
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    if x.numel() == 0:
        nan = float("nan")
        return [], (y, total, mean.fill_(nan), rstd.fill_(nan))
    share, rows = RowShare.of(x.shape[-1], (x, residual, w, b), policy), rstd.numel()
    has = (int(weight is not None), int(bias is not None))
    threads, group = share.grid(rows)
    launch = Launch(
        "train/add_layer_norm.metal",
        "add_layer_norm",
        share.norm_variant(x.dtype, dtype),
        (x, residual, w, b, y, total, mean, rstd, rows, share.chunks, share.lanes, eps, *has),
        threads=threads,
        group=group,
    )
    return [launch], (y, total, mean, rstd)
