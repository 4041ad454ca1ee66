# SPDX-License-Identifier: MIT
"""Programs of add_rms_norm, out of place and in place."""

from typing import Any

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import Arguments, Buffer, Program
from metalcore.metal.train._rows import RowShare
from metalcore.metal.train.rms_norm import kernel_weight

FILE = "train/add_rms_norm.metal"


@metal_kernel("add_rms_norm")
def forward(p: Program, a: Arguments) -> tuple[Buffer, Buffer, Buffer]:
    total = p.new_like(a.residual)
    y, rstd = _norm_of_sum(p, a, p.dense(a.residual), total)
    return y, total, rstd


@metal_kernel("add_rms_norm_")
def in_place(p: Program, a: Arguments) -> Any:
    if not a.residual.is_contiguous:
        return NotImplemented
    return _norm_of_sum(p, a, a.residual, a.residual)


def _norm_of_sum(
    p: Program, a: Arguments, residual: Buffer, total: Buffer
) -> tuple[Buffer, Buffer]:
    x = p.dense(a.x)
    w = kernel_weight(p, x, a.weight)
    y, rstd = p.new_like(x), p.new(x.shape[:-1])
    if x.numel == 0:
        return y, p.fill(rstd, float("nan"))
    row = RowShare.of(x.shape[-1], (x, residual, w, total), p.policy)
    args = (x, residual, w, y, total, rstd, row.chunks, a.eps, a.weight_offset)
    variant = (*row.variant(x.dtype, w.dtype), row.keep, a.weight is not None)
    p.launch(FILE, "add_rms_norm", variant, args, *row.grid(rstd.numel))
    return y, rstd
