# SPDX-License-Identifier: MIT
"""Programs of softmax and softmax_backward."""

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import Arguments, Buffer, Program
from metalcore.metal.train._rows import KEEP, RowShare

FILE = "train/softmax.metal"


@metal_kernel("softmax")
def forward(p: Program, a: Arguments) -> Buffer:
    x = p.dense(a.x)
    y = p.new_like(x)
    if x.numel == 0:
        return y
    if a.mask is None:
        mask = x
        b, c, *strides = (1, x.shape[-2] if a.causal else 1, 0, 0, 0)
    else:
        mask, (b, c, *strides) = _broadcast(p, a.mask, x, a.causal)
    share, rows = RowShare.of(x.shape[-1], (x, mask), p.policy), x.numel // x.shape[-1]
    args = (x, mask, y, share.chunks, a.scale, b, c, *strides)
    variant = (*share.variant(x.dtype), share.keep, a.mask is not None, a.causal)
    p.launch(FILE, "softmax", variant, args, *share.grid(rows))
    return y


@metal_kernel("softmax_backward")
def backward(p: Program, a: Arguments) -> Buffer:
    dy, y = p.dense(a.dy), p.dense(a.y)
    dx = p.new_like(y)
    if y.numel == 0:
        return dx
    share, rows = RowShare.of(y.shape[-1], (dy, y), p.policy), y.numel // y.shape[-1]
    args = (dy, y, dx, share.chunks, a.scale)
    variant = (*share.variant(y.dtype), KEEP)
    p.launch(FILE, "softmax_backward", variant, args, *share.grid(rows))
    return dx


def _broadcast(p: Program, mask: Buffer, x: Buffer, causal: bool) -> tuple[Buffer, tuple[int, ...]]:
    """A contiguous mask, and (B, C, strides in rows of the mask for A, B, C), with which it meets
    x's rows [A, B, C]: dimensions that it has or lacks together count as one.

    Where that takes more than three, or causal needs C to be the rows of x, the mask is expanded.
    """
    sizes = list(x.shape[:-1])
    has = [1] * (len(sizes) - len(mask.shape) + 1) + list(mask.shape[:-1])
    groups: list[tuple[int, int]] = []
    for size, own in zip(sizes, has, strict=True):
        if groups and (groups[-1][1] == groups[-1][0]) == (own == size) and not causal:
            groups[-1] = (groups[-1][0] * size, groups[-1][1] * own)
        else:
            groups.append((size, own))
    if len(groups) > 3:
        rows, c = x.numel // x.shape[-1], x.shape[-2]
        return p.dense(mask.expand(*x.shape)), (rows // c, c, 0, c, 1)
    groups = [(1, 1)] * (3 - len(groups)) + groups
    strides, step = [], 1
    for size, own in reversed(groups):
        strides.append(step if own == size else 0)
        step *= own
    (_, _), (b, _), (c, _) = groups
    return p.dense(mask), (b, c, *reversed(strides))
