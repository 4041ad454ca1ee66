# SPDX-License-Identifier: MIT
"""Launches of adamw_step and adamw_norm."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import MSL_TYPE, Call, Launch, Planned, metal_kernel, round_up

FILE = "train/adamw_step.metal"

# Tensors per launch: four buffers each, of 31. With amsgrad each takes a second slot.
SLOTS = 7
SLOTS_WITH_MAX = 3


@metal_kernel("adamw_step")
def plan_step(
    policy: Values,
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    grad_scale: float,
    grad_norm: Tensor | None,
    max_norm: float,
    stochastic: bool,
    seed: int,
) -> Planned | None:
    if any(p.dtype not in MSL_TYPE for p in params):
        return None
    lists = [params, grads, exp_avgs, exp_avg_sqs, *([max_exp_avg_sqs] if max_exp_avg_sqs else [])]
    used = [[_dense(t) for t in given] for given in lists]
    counted = [float(s) + 1 for s in steps]
    # one launch has one type, one width and one step number
    alike: dict[tuple[str, float], list[int]] = {}
    for k, tensors in enumerate(zip(*used, strict=True)):
        if tensors[0].numel():
            alike.setdefault((_variant(*tensors), counted[k]), []).append(k)
    launches = []
    for (variant, number), places in alike.items():
        numbers = (
            1 - lr * weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            lr / (1 - beta1**number),
            1 / math.sqrt(1 - beta2**number),
            eps,
            -1.0 if maximize else 1.0,
            1 / grad_scale,
            max_norm if grad_norm is not None else 0.0,
        )
        for batch in _batches(places, SLOTS_WITH_MAX if max_exp_avg_sqs else SLOTS):
            sizes = [params[k].numel() for k in batch]
            groups = [-(-n // (4 * policy["threads"])) for n in sizes]
            seeds = [_seed(seed, number, k) for k in batch]
            buffers = [_slots([tensors[k] for k in batch]) for tensors in used[:4]]
            if max_exp_avg_sqs:
                tops = [used[4][k] for k in batch]
                buffers[3] = _slots([*_slots(buffers[3], SLOTS_WITH_MAX), *tops])
            table = (
                *_fill(sizes, 0),
                *_fill(_starts(groups), sum(groups)),
                *_fill(seeds, 0),
                int(bool(max_exp_avg_sqs)),
                int(stochastic),
            )
            # a moment stands in for a norm that is not there
            any_floats = used[2][batch[0]].view(-1).view(torch.float32)
            norm = any_floats if grad_norm is None else grad_norm.float().reshape(1)
            launches.append(
                Launch(
                    FILE,
                    "adamw_step",
                    variant,
                    (*(b for four in buffers for b in four), norm, numbers, table),
                    threads=(sum(groups) * policy["threads"], 1, 1),
                    group=(policy["threads"], 1, 1),
                )
            )
    pairs = list(zip(lists, used, strict=True))
    written = pairs if grad_scale != 1 else [pairs[0], *pairs[2:]]
    return [*launches, *_finish(steps, written)], None


def _finish(
    steps: list[Tensor], written: list[tuple[list[Tensor], list[Tensor]]]
) -> Iterator[Call]:
    """Count the steps, and copy back what the kernels could not write in place."""
    for step in steps:
        yield Call(step.add_, (1,))
    for given, used in written:
        for a, b in zip(given, used, strict=True):
            if a is not b:
                yield Call(a.copy_, (b,))


def _dense(t: Tensor) -> Tensor:
    """`t` as kernels take it; bytes of moments have to be aligned to an int."""
    fits = t.is_contiguous() and (t.dtype != torch.uint8 or t.storage_offset() % 4 == 0)
    return t if fits else t.clone(memory_format=torch.contiguous_format)


def _variant(p: Tensor, g: Tensor, m: Tensor, *others: Tensor) -> str:
    tensors = (p, g) if m.dtype == torch.uint8 else (p, g, m, *others)
    width = 4 if all(t.storage_offset() % 4 == 0 for t in tensors) else 1
    return f"{MSL_TYPE[p.dtype]}_{'uchar' if m.dtype == torch.uint8 else 'float'}_{width}"


def _seed(seed: int, number: float, place: int) -> int:
    return (seed * 0x9E3779B9 + place * 0xC2B2AE35 + int(number) * 0x85EBCA6B) % (1 << 32)


def _batches(places: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(places), size):
        yield places[start : start + size]


def _starts(groups: list[int]) -> list[int]:
    return [sum(groups[:k]) for k in range(len(groups))]


def _fill(values: list[int], rest: int) -> list[int]:
    return [*values, *[rest] * (SLOTS - len(values))]


def _slots(tensors: list[Tensor], count: int = SLOTS) -> list[Tensor]:
    """As many tensors as there are slots; the first one stands in the empty ones."""
    return [*tensors[:count], *[tensors[0]] * (count - len(tensors))]


@metal_kernel("adamw_norm")
def plan_norm(policy: Values, grads: list[Tensor]) -> Planned | None:
    if any(g.dtype not in MSL_TYPE for g in grads):
        return None
    used = [g.contiguous() for g in grads]
    norm = used[0].new_zeros((), dtype=torch.float32)
    alike: dict[str, list[int]] = {}
    for k, g in enumerate(used):
        if g.numel():
            width = 4 if g.storage_offset() % 4 == 0 else 1
            alike.setdefault(f"{MSL_TYPE[g.dtype]}_{width}", []).append(k)
    values, threads = policy["values_per_sum"], policy["threads"]
    # one sum after the other in the order of the list, whatever launch they are of
    groups_of = [-(-g.numel() // values) for g in used]
    first_sums, count = _starts(groups_of), sum(groups_of)
    if count == 0:
        return [], norm
    sums = norm.new_empty(count)
    launches = []
    for variant, places in alike.items():
        for batch in _batches(places, SLOTS):
            tensors = [used[k] for k in batch]
            groups = [groups_of[k] for k in batch]
            table = (
                *_fill([g.numel() for g in tensors], 0),
                *_fill(_starts(groups), sum(groups)),
                *_fill([first_sums[k] for k in batch], 0),
            )
            launches.append(
                Launch(
                    FILE,
                    "adamw_norm",
                    variant,
                    (*_slots(tensors), sums, values, table),
                    threads=(sum(groups) * threads, 1, 1),
                    group=(threads, 1, 1),
                )
            )
    lanes = min(threads, round_up(count, 32))
    launches.append(
        Launch(
            FILE,
            "adamw_norm_total",
            "float",
            (sums, norm.view(1), count),
            threads=(lanes, 1, 1),
            group=(lanes, 1, 1),
        )
    )
    return launches, norm
