# SPDX-License-Identifier: MIT
"""Launches of kl_div and jsd, whose kernels differ in one function."""

import torch
from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import MSL_TYPE, Launch, Planned, round_up


def plan_forward(
    policy: Values,
    name: str,
    input: Tensor,
    target: Tensor,
    parameter: float,
    reduce: bool,
    scale: float,
) -> Planned | None:
    if input.dtype not in MSL_TYPE:
        return None
    file, threads = f"train/{name}.metal", policy["threads"]
    x, t = input.contiguous(), target.contiguous()
    width = _width(x, t)
    variant, n = f"{name}_{MSL_TYPE[x.dtype]}_{width}", x.numel() // width
    if not reduce:
        loss = torch.empty_like(x)
        args = (x, t, loss, n, parameter, scale)
        grid = ((round_up(n, threads), 1, 1), (threads, 1, 1))
        return [Launch(file, "divergence", variant, args, *grid)] if n else [], loss
    loss = x.new_empty((), dtype=torch.float32)
    run = threads * policy["chunks_per_thread"]
    runs = -(-n // run)
    partial = x.new_empty(max(1, runs), dtype=torch.float32)
    launches = []
    if n:
        args = (x, t, partial, n, run, parameter)
        grid = ((runs * threads, 1, 1), (threads, 1, 1))
        launches.append(Launch(file, "divergence_sum", variant, args, *grid))
    lanes = min(threads, round_up(max(1, runs), 32))
    grid = ((lanes, 1, 1), (lanes, 1, 1))
    total = (partial, loss, runs, scale)
    return [*launches, Launch(file, "divergence_total", f"{name}_float", total, *grid)], loss


def plan_backward(
    policy: Values,
    name: str,
    dloss: Tensor,
    input: Tensor,
    target: Tensor,
    parameter: float,
    reduce: bool,
    scale: float,
    need_dtarget: bool,
) -> Planned | None:
    if input.dtype not in MSL_TYPE:
        return None
    x, t, d = input.contiguous(), target.contiguous(), dloss.contiguous()
    dinput = torch.empty_like(x)
    dtarget = torch.empty_like(x) if need_dtarget else x.new_empty(0)
    width = _width(x, t) if reduce else _width(x, t, d)
    n, threads = x.numel() // width, policy["threads"]
    dsum = d.float().reshape(1) if reduce else x.new_ones(1, dtype=torch.float32)
    launch = Launch(
        f"train/{name}.metal",
        "divergence_backward",
        f"{name}_{MSL_TYPE[x.dtype]}_{width}",
        (
            *(x if reduce else d, dsum, x, t, dinput, dtarget if need_dtarget else dinput),
            *(n, parameter, scale, int(reduce), int(need_dtarget)),
        ),
        threads=(round_up(max(1, n), threads), 1, 1),
        group=(threads, 1, 1),
    )
    return [launch] if n else [], (dinput, dtarget)


def _width(*tensors: Tensor) -> int:
    return 4 if all(x.numel() % 4 == 0 == x.storage_offset() % 4 for x in tensors) else 1
