# SPDX-License-Identifier: MIT
"""Programs of kl_div and jsd, whose kernels differ in one type."""

import torch

from metalcore.metal.program import (
    MSL_TYPE,
    SIMD_WIDTH,
    Arguments,
    Buffer,
    Number,
    Program,
    round_up,
)
from metalcore.metal.train._elementwise import chunk_width, launch, pieces


def forward(p: Program, a: Arguments, file: str, kind: str, parameter: float | Number) -> Buffer:
    """The divergence `kind`, a type of `file` that is made from `parameter`."""
    threads, x, target = p.policy["threads"], p.dense(a.input), p.dense(a.target)
    width = chunk_width((x, target))
    variant, n = (kind, MSL_TYPE[x.dtype], width), x.numel // width
    if not a.reduce:
        loss = p.new_like(x)
        for chunks, buffers in pieces((x, target, loss), width):
            args = (*buffers, chunks, parameter, a.scale)
            launch(p, file, "divergence", variant, args, chunks)
        return loss
    run = threads * p.policy["chunks_per_thread"]
    runs = -(-n // run)
    loss, partial = p.new(()), p.new((max(1, runs),))
    if n:
        parts = (x, target, partial, n, run, parameter)
        p.launch(file, "divergence_sum", variant, parts, runs * threads, threads)
    lanes = min(threads, round_up(max(1, runs), SIMD_WIDTH))
    p.launch(file, "divergence_total", (), (partial, loss, runs, a.scale), lanes, lanes)
    return loss


def backward(
    p: Program, a: Arguments, file: str, kind: str, parameter: float | Number
) -> tuple[Buffer, Buffer]:
    x, target = p.dense(a.input), p.dense(a.target)
    dloss = x if a.reduce else p.dense(a.dloss)
    dinput = p.new_like(x)
    dtarget = p.new_like(x) if a.need_dtarget else p.new((0,), x.dtype)
    if x.numel == 0:
        return dinput, dtarget
    width = chunk_width((x, target, dloss))
    dsum = p.dense(a.dloss, torch.float32) if a.reduce else p.new((1,))
    variant = (kind, MSL_TYPE[x.dtype], width, a.reduce, a.need_dtarget)
    written = [dtarget] if a.need_dtarget else []
    unused = [] if written else [p.new((4,), x.dtype)]
    for chunks, (d, *inputs) in pieces((dloss, x, target, dinput, *written), width):
        args = (d, dsum, *inputs, *unused, chunks, parameter, a.scale)
        launch(p, file, "divergence_backward", variant, args, chunks)
    return dinput, dtarget
