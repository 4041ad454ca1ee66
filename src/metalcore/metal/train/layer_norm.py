# SPDX-License-Identifier: MIT
"""Programs of layer_norm and layer_norm_backward."""

import torch

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import Arguments, Buffer, Program, Value
from metalcore.metal.train._rows import RowShare
from metalcore.metal.train.rms_norm import sum_shares

FILE = "train/layer_norm.metal"
BACKWARD_FILE = "train/layer_norm_backward.metal"
# Chunks of a row that a thread keeps, beside those of dy, weight and two sums.
_KEEP_BACKWARD = 3


def kernel_weights(
    p: Program, x: Buffer, weight: Buffer | None, bias: Buffer | None
) -> tuple[Buffer, Buffer, torch.dtype]:
    """The weights as kernels take them: both in x's dtype or both in float32, and that dtype; for
    one that is not there stands the other, or x."""
    present = [t for t in (weight, bias) if t is not None]
    dtype = x.dtype if all(t.dtype == x.dtype for t in present) else torch.float32
    given = [None if t is None else p.dense(t, dtype) for t in (weight, bias)]
    stand_in = next((t for t in given if t is not None), x)
    w, b = (stand_in if t is None else t for t in given)
    return w, b, dtype


@metal_kernel("layer_norm")
def forward(p: Program, a: Arguments) -> tuple[Buffer, Buffer, Buffer]:
    x = p.dense(a.x)
    w, b, dtype = kernel_weights(p, x, a.weight, a.bias)
    y, mean, rstd = p.new_like(x), p.new(x.shape[:-1]), p.new(x.shape[:-1])
    if x.numel == 0:
        return y, p.fill(mean, float("nan")), p.fill(rstd, float("nan"))
    share, rows = RowShare.of(x.shape[-1], (x, w, b), p.policy), rstd.numel
    args = (x, w, b, y, mean, rstd, share.chunks, a.eps)
    flags = (a.weight is not None, a.bias is not None)
    variant = (*share.variant(x.dtype, dtype), share.keep, *flags)
    p.launch(FILE, "layer_norm", variant, args, *share.grid(rows))
    return y, mean, rstd


@metal_kernel("layer_norm_backward")
def backward(p: Program, a: Arguments) -> tuple[Buffer, ...]:
    dy, x, mean, rstd = (p.dense(t) for t in (a.dy, a.x, a.mean, a.rstd))
    dsum = x if a.dsum is None else p.dense(a.dsum)
    w, _, dtype = kernel_weights(p, x, a.weight, None)
    n, rows, dx = x.shape[-1], rstd.numel, p.new_like(x)
    wanted = (a.weight if a.need_dweight else None, a.bias if a.need_dbias else None)
    grads = [p.new((0,), dy.dtype) if t is None else p.new_like(t) for t in wanted]
    if x.numel == 0:
        return dx, *(p.fill(grad, 0.0) for grad in grads)
    share = RowShare.of_gradients(n, (dy, x, w, dsum), p.policy, _KEEP_BACKWARD)
    rows_per_block = -(-rows // share.busy_groups(p.policy))
    blocks = -(-rows // rows_per_block)
    sums = [t is not None for t in wanted]
    parts = [p.new((blocks, n) if s else (4,)) for s in sums]
    buffers = (dy, x, w, mean, rstd, dsum, dx, *parts)
    args: tuple[Value, ...] = (*buffers, rows, rows_per_block, share.chunks)
    flags = (a.weight is not None, a.dsum is not None, *sums)
    variant = (*share.variant(x.dtype, dtype), _KEEP_BACKWARD, *flags)
    p.launch(BACKWARD_FILE, "layer_norm_backward", variant, args, blocks * share.lanes, share.lanes)
    for part, grad, wants in zip(parts, grads, sums, strict=True):
        if wants:
            sum_shares(p, part, grad)
    return dx, *grads
