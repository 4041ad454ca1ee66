# SPDX-License-Identifier: MIT
"""Programs of cross_entropy, beside the logits and in their place."""

from typing import Any

import torch

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import SIMD_WIDTH, Arguments, Buffer, Program, round_up
from metalcore.metal.train._rows import KEEP, RowShare

FILE = "train/cross_entropy.metal"
# What plans choose kernels by: the plain loss pays for neither.
_OPTIONS = ("label_smoothing", "softcap")
_NONE, _MEAN = 0, 1


@metal_kernel("cross_entropy", keyed=_OPTIONS)
def forward(p: Program, a: Arguments) -> Any:
    if a.logits.shape[1] == 0:
        return NotImplemented
    logits = p.dense(a.logits)
    dlogits = p.new_like(logits) if a.need_dlogits else p.new((0,), logits.dtype)
    loss, _ = _loss(p, a, logits, dlogits if a.need_dlogits else None)
    return loss, dlogits


@metal_kernel("cross_entropy_", keyed=_OPTIONS)
def in_place(p: Program, a: Arguments) -> Any:
    if a.logits.shape[1] == 0 or not a.logits.is_contiguous:
        return NotImplemented
    return _loss(p, a, a.logits, a.logits)


def _loss(
    p: Program, a: Arguments, logits: Buffer, dlogits: Buffer | None
) -> tuple[Buffer, Buffer]:
    """The loss and the lse of each row; the gradient goes to `dlogits`."""
    (rows, n), is_mean = logits.shape, a.reduction == _MEAN
    losses, lse = p.new((rows,)), p.new((rows,))
    target = p.dense(a.target)
    weight = p.new((4,)) if a.weight is None else p.dense(a.weight, torch.float32)
    lanes = min(p.policy["threads"], round_up(max(1, rows), SIMD_WIDTH))
    divisor = weight
    if is_mean and a.denominator is not None:
        divisor = p.dense(a.denominator, torch.float32)
    elif is_mean:
        divisor = p.new((1,))
        args = (target, weight, divisor, rows, n, a.ignore_index)
        p.launch(FILE, "cross_entropy_divisor", (a.weight is not None,), args, lanes, lanes)
    if rows:
        out = p.new((4,), logits.dtype) if dlogits is None else dlogits
        row = RowShare.of(n, (logits, out, weight), p.policy)
        is_kept = dlogits is not None and row.chunks <= KEEP * row.lanes
        buffers = (logits, logits, target, weight, weight, divisor, losses, lse, out)
        numbers = (row.chunks, a.ignore_index, a.label_smoothing, a.z_loss, a.softcap)
        flags = (a.weight is not None, is_mean, dlogits is not None)
        options = (a.label_smoothing > 0, a.softcap > 0)
        variant = (*row.variant(logits.dtype), KEEP if is_kept else 0, *flags, *options)
        p.launch(FILE, "cross_entropy", variant, (*buffers, *numbers), *row.grid(rows))
    if a.reduction == _NONE:
        return losses, lse
    loss = p.new(())
    p.launch(FILE, "cross_entropy_total", (is_mean,), (losses, divisor, loss, rows), lanes, lanes)
    return loss, lse
