# SPDX-License-Identifier: MIT
"""The program of add_layer_norm."""

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import Arguments, Buffer, Program
from metalcore.metal.train._rows import RowShare
from metalcore.metal.train.layer_norm import kernel_weights

FILE = "train/add_layer_norm.metal"


@metal_kernel("add_layer_norm")
def forward(p: Program, a: Arguments) -> tuple[Buffer, ...]:
    x, residual = p.dense(a.x), p.dense(a.residual)
    w, b, dtype = kernel_weights(p, x, a.weight, a.bias)
    y, total = p.new_like(x), p.new_like(x)
    mean, rstd = p.new(x.shape[:-1]), p.new(x.shape[:-1])
    if x.numel == 0:
        return y, total, p.fill(mean, float("nan")), p.fill(rstd, float("nan"))
    share, rows = RowShare.of(x.shape[-1], (x, residual, w, b), p.policy), rstd.numel
    args = (x, residual, w, b, y, total, mean, rstd, share.chunks, a.eps)
    flags = (a.weight is not None, a.bias is not None)
    variant = (*share.variant(x.dtype, dtype), share.keep, *flags)
    p.launch(FILE, "add_layer_norm", variant, args, *share.grid(rows))
    return y, total, mean, rstd
