# SPDX-License-Identifier: MIT
"""Programs of rms_norm and rms_norm_backward."""

import torch

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import MSL_TYPE, SIMD_WIDTH, Arguments, Buffer, Program, round_up
from metalcore.metal.train._rows import KEEP, RowShare

FILE = "train/rms_norm.metal"
# Chunks of a row that a thread keeps, beside those of dy, weight and a sum: in half types and in
# float32.
_KEEP_BACKWARD = (4, 3)


def kernel_weight(p: Program, x: Buffer, weight: Buffer | None) -> Buffer:
    """The weight as kernels take it: in x's dtype or float32; x itself where there is none."""
    if weight is None:
        return x
    return p.dense(weight, x.dtype if weight.dtype == x.dtype else torch.float32)


@metal_kernel("rms_norm")
def forward(p: Program, a: Arguments) -> tuple[Buffer, Buffer]:
    x = p.dense(a.x)
    w = kernel_weight(p, x, a.weight)
    y, rstd = p.new_like(x), p.new(x.shape[:-1])
    if x.numel == 0:
        return y, p.fill(rstd, float("nan"))
    rows, has_weight = rstd.numel, a.weight is not None
    row = RowShare.of(x.shape[-1], (x, w), p.policy)
    if row.chunks > KEEP * SIMD_WIDTH:
        in_groups = (x, w, y, rstd, row.chunks, a.eps, a.weight_offset)
        variant = (*row.variant(x.dtype, w.dtype), row.keep, has_weight)
        p.launch(FILE, "rms_norm", variant, in_groups, *row.grid(rows))
        return y, rstd
    # short runs leave no thread idle, long ones read the weight less often
    run = min(p.policy["rows_per_simdgroup"], max(1, rows // row.busy_groups(p.policy)))
    simdgroups = -(-rows // run)
    group = SIMD_WIDTH * min(p.policy["simdgroups"], simdgroups)
    args = (x, w, y, rstd, rows, run, row.chunks, a.eps, a.weight_offset)
    variant = (*row.variant(x.dtype, w.dtype), KEEP, has_weight)
    threads = round_up(simdgroups * SIMD_WIDTH, group)
    p.launch(FILE, "rms_norm_simdgroup", variant, args, threads, group)
    return y, rstd


@metal_kernel("rms_norm_backward")
def backward(p: Program, a: Arguments) -> tuple[Buffer, Buffer]:
    dy, x, rstd = p.dense(a.dy), p.dense(a.x), p.dense(a.rstd)
    dsum = x if a.dsum is None else p.dense(a.dsum)
    w = kernel_weight(p, x, a.weight)
    n, rows, has_share = x.shape[-1], rstd.numel, a.weight is not None and a.need_dweight
    dx = p.new_like(x)
    dweight = p.new_like(a.weight) if has_share else p.new((0,), dy.dtype)
    if x.numel == 0:
        return dx, p.fill(dweight, 0.0)
    keep = _KEEP_BACKWARD[x.dtype == torch.float32]
    row = RowShare.of_gradients(n, (dy, x, w, dsum), p.policy, keep)
    rows_per_block = -(-rows // row.busy_groups(p.policy))
    blocks = -(-rows // rows_per_block)
    share = p.new((blocks, n) if has_share else (4,))
    args = (dy, x, w, rstd, dsum, dx, share, rows, rows_per_block, row.chunks, a.weight_offset)
    flags = (a.weight is not None, a.dsum is not None, has_share)
    variant = (*row.variant(x.dtype, w.dtype), keep, *flags)
    p.launch(FILE, "rms_norm_backward", variant, args, blocks * row.lanes, row.lanes)
    if has_share:
        sum_shares(p, share, dweight)
    return dx, dweight


def sum_shares(p: Program, share: Buffer, total: Buffer) -> None:
    """total[i] = the sum of share[:, i], in order."""
    blocks, n = share.shape
    args = (share, total, blocks, n)
    threads = p.policy["threads"]
    variant = (MSL_TYPE[total.dtype],)
    p.launch(FILE, "rms_norm_dweight", variant, args, round_up(n, threads), threads)
