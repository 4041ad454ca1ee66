# SPDX-License-Identifier: MIT
"""Launches of layer_norm and layer_norm_backward."""

import torch
from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import MSL_TYPE, Launch, Planned, metal_kernel, round_up
from metalcore.metal.train import rms_norm
from metalcore.metal.train._rows import RowShare


def kernel_weights(
    x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, torch.dtype]:
    """The weights as kernels take them: both in x's dtype or both in float32, and that dtype; x
    itself where there is none."""
    present = [t for t in (weight, bias) if t is not None]
    dtype = x.dtype if all(t.dtype == x.dtype for t in present) else torch.float32
    w, b = (x if t is None else t.to(dtype).contiguous() for t in (weight, bias))
    return w, b, dtype


@metal_kernel("layer_norm")
def plan_forward(
    policy: Values, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Planned | None:
    if x.dtype not in MSL_TYPE:
        return None
    x = x.contiguous()
    w, b, dtype = kernel_weights(x, weight, bias)
    y = torch.empty_like(x)
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    if x.numel() == 0:
        nan = float("nan")
        return [], (y, mean.fill_(nan), rstd.fill_(nan))
    share, rows = RowShare.of(x.shape[-1], (x, w, b), policy), rstd.numel()
    has = (int(weight is not None), int(bias is not None))
    threads, group = share.grid(rows)
    launch = Launch(
        "train/layer_norm.metal",
        "layer_norm",
        share.norm_variant(x.dtype, dtype),
        (x, w, b, y, mean, rstd, rows, share.chunks, share.lanes, eps, *has),
        threads=threads,
        group=group,
    )
    return [launch], (y, mean, rstd)


@metal_kernel("layer_norm_backward")
def plan_backward(
    policy: Values,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dsum: Tensor | None,
    need_dweight: bool,
    need_dbias: bool,
) -> Planned | None:
    if x.dtype not in MSL_TYPE:
        return None
    dy, x, mean, rstd = (t.contiguous() for t in (dy, x, mean, rstd))
    add = x if dsum is None else dsum.contiguous()
    w, _, dtype = kernel_weights(x, weight, None)
    n, rows, dx = x.shape[-1], rstd.numel(), torch.empty_like(x)
    wanted = (weight if need_dweight else None, bias if need_dbias else None)
    grads = [
        dy.new_empty(0) if t is None else torch.zeros_like(t, memory_format=torch.contiguous_format)
        for t in wanted
    ]
    if x.numel() == 0:
        return [], (dx, *grads)

    share = RowShare.of(n, (dy, x, w, add), policy)
    rows_per_block = -(-rows // max(1, policy["busy_threads"] // share.lanes))
    blocks = -(-rows // rows_per_block)
    sums = [int(grad.numel() > 0) for grad in grads]
    parts = [x.new_empty((blocks, n) if s else 4, dtype=torch.float32) for s in sums]
    launches = [
        Launch(
            "train/layer_norm_backward.metal",
            "layer_norm_backward",
            share.variant(x.dtype, dtype),
            (
                *(dy, x, w, mean, rstd, add, dx, *parts, rows, rows_per_block, share.chunks),
                *(int(weight is not None), int(dsum is not None), *sums),
            ),
            threads=(blocks * share.lanes, 1, 1),
            group=(share.lanes, 1, 1),
        )
    ]
    for part, grad, wants in zip(parts, grads, sums, strict=True):
        if wants:
            launches.append(
                Launch(
                    rms_norm.FILE,
                    "rms_norm_dweight",
                    MSL_TYPE[grad.dtype],
                    (part, grad, blocks, n),
                    threads=(round_up(n, policy["threads"]), 1, 1),
                    group=(policy["threads"], 1, 1),
                )
            )
    return launches, (dx, *grads)
