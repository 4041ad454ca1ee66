# SPDX-License-Identifier: MIT
"""Launches of softmax and softmax_backward."""

from typing import Any

import torch
from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import MSL_TYPE, Launch, Planned, metal_kernel
from metalcore.metal.train._rows import RowShare

FILE = "train/softmax.metal"


@metal_kernel("softmax")
def plan_forward(
    policy: Values, x: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> Planned | None:
    if x.dtype not in MSL_TYPE:
        return None
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel() == 0:
        return [], y
    if mask is None:
        m = x
        rows_of_mask: tuple[int, ...] = (1, x.shape[-2] if causal else 1, 0, 0, 0)
    else:
        m, rows_of_mask = _broadcast(mask, x, causal)
    share = RowShare.of(x.shape[-1], (x, m), policy)
    b, c, *strides = rows_of_mask
    numbers = (scale, int(causal), int(mask is not None), b, c)
    args = (x, m, y, x.numel() // x.shape[-1], share.chunks, share.lanes, *numbers)
    steps = (s * share.chunks for s in strides)
    return [_launch("softmax", x, share, (*args, *steps))], y


@metal_kernel("softmax_backward")
def plan_backward(policy: Values, dy: Tensor, y: Tensor, scale: float) -> Planned | None:
    if y.dtype not in MSL_TYPE:
        return None
    dy, y = dy.contiguous(), y.contiguous()
    dx = torch.empty_like(y)
    if y.numel() == 0:
        return [], dx
    share = RowShare.of(y.shape[-1], (dy, y), policy)
    args = (dy, y, dx, y.numel() // y.shape[-1], share.chunks, share.lanes, scale)
    return [_launch("softmax_backward", y, share, args)], dx


def _launch(function: str, x: Tensor, share: RowShare, args: tuple[Any, ...]) -> Launch:
    variant = ("long_" if share.is_long else "") + share.variant(x.dtype)
    threads, group = share.grid(x.numel() // x.shape[-1])
    return Launch(FILE, function, variant, args, threads=threads, group=group)


def _broadcast(mask: Tensor, x: Tensor, causal: bool) -> tuple[Tensor, tuple[int, ...]]:
    """A contiguous mask, and (B, C, strides in rows of the mask for A, B, C), with which it meets
    x's rows [A, B, C]: dimensions that it has or lacks together count as one.

    Where that takes more than three, or causal needs C to be the rows of x, the mask is expanded.
    """
    mask = mask.contiguous()
    sizes = list(x.shape[:-1])
    has = [1] * (len(sizes) - mask.dim() + 1) + list(mask.shape[:-1])
    groups: list[tuple[int, int]] = []
    for size, own in zip(sizes, has, strict=True):
        if groups and (groups[-1][1] == groups[-1][0]) == (own == size) and not causal:
            groups[-1] = (groups[-1][0] * size, groups[-1][1] * own)
        else:
            groups.append((size, own))
    if len(groups) > 3:
        full = mask.expand(x.shape).contiguous()
        rows, c = full.numel() // x.shape[-1], x.shape[-2]
        return full, (rows // c, c, 0, c, 1)
    groups = [(1, 1)] * (3 - len(groups)) + groups
    strides, step = [], 1
    for size, own in reversed(groups):
        strides.append(step if own == size else 0)
        step *= own
    (_, _), (b, _), (c, _) = groups
    return mask, (b, c, *reversed(strides))
