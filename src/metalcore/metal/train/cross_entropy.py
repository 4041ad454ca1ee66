# SPDX-License-Identifier: MIT
"""Launches of cross_entropy, beside the logits and in their place."""

import torch
from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import MSL_TYPE, Launch, Planned, metal_kernel, round_up
from metalcore.metal.train._rows import RowShare

FILE = "train/cross_entropy.metal"
# Bytes of a row that a thread keeps in registers, as the kernel has it. Others take more of them.
_KEPT_BYTES = 64
_NONE, _MEAN = 0, 1


@metal_kernel("cross_entropy")
def plan_forward(
    policy: Values,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: int,
    need_dlogits: bool,
) -> Planned | None:
    if logits.dtype not in MSL_TYPE:
        return None
    logits = logits.contiguous()
    dlogits = torch.empty_like(logits) if need_dlogits else logits.new_empty(0)
    numbers = (label_smoothing, z_loss, softcap)
    launches, loss, _ = _plan(
        policy, logits, target, weight, denominator, ignore_index, numbers, reduction, dlogits
    )
    return launches, (loss, dlogits)


@metal_kernel("cross_entropy_")
def plan_in_place(
    policy: Values,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: int,
) -> Planned | None:
    if logits.dtype not in MSL_TYPE or not logits.is_contiguous():
        return None
    numbers = (label_smoothing, z_loss, softcap)
    launches, loss, lse = _plan(
        policy, logits, target, weight, denominator, ignore_index, numbers, reduction, logits
    )
    return launches, (loss, lse)


def _plan(
    policy: Values,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor | None,
    ignore_index: int,
    numbers: tuple[float, float, float],
    reduction: int,
    dlogits: Tensor,
) -> tuple[list[Launch], Tensor, Tensor]:
    rows, n = logits.shape
    losses, lse = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    weights = None if weight is None else weight.float().contiguous()
    divisor = _divisor(logits, target, weights, denominator, ignore_index, reduction)
    launches = []
    if logits.numel() > 0:
        w = losses.new_empty(4) if weights is None else weights
        row = RowShare.of(n, (logits, dlogits, w), policy)
        is_long = n * logits.element_size() > row.lanes * _KEPT_BYTES
        launches.append(
            Launch(
                FILE,
                "cross_entropy",
                ("long_" if is_long else "") + row.variant(logits.dtype),
                (
                    *(logits, logits, target.contiguous(), w, w, divisor, losses, lse),
                    *(dlogits if dlogits.numel() else logits, row.chunks, ignore_index, *numbers),
                    *(int(weight is not None), int(dlogits.numel() > 0)),
                ),
                threads=(rows * row.lanes, 1, 1),
                group=(row.lanes, 1, 1),
            )
        )
    if reduction == _NONE:
        return launches, losses, lse
    loss = logits.new_empty((), dtype=torch.float32)
    lanes = min(policy["threads"], round_up(max(1, rows), 32))
    launches.append(
        Launch(
            FILE,
            "cross_entropy_total",
            "float",
            (losses, divisor, loss, rows),
            threads=(lanes, 1, 1),
            group=(lanes, 1, 1),
        )
    )
    return launches, loss, lse


def _divisor(
    logits: Tensor,
    target: Tensor,
    weights: Tensor | None,
    denominator: Tensor | None,
    ignore_index: int,
    reduction: int,
) -> Tensor:
    """What losses are divided by, on the device: the host does not wait for it."""
    if reduction != _MEAN:
        return logits.new_ones(1, dtype=torch.float32)
    if denominator is not None:
        return denominator.float().reshape(1)
    counted = target != ignore_index
    if weights is None:
        return counted.sum(dtype=torch.float32).reshape(1)
    own = weights[target.clamp(0, weights.numel() - 1)]
    return torch.where(counted, own, 0).sum().reshape(1)
