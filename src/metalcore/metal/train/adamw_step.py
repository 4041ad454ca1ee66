# SPDX-License-Identifier: MIT
"""Programs of adamw_step and adamw_norm: one launch for several tensors."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import MSL_TYPE, SIMD_WIDTH, Arguments, Buffer, Program, round_up

FILE = "train/adamw_step.metal"

# Tensors per launch of adamw_step: each takes seven of the 31 buffers. Where it takes more, these
# are in the slots of another tensor.
SLOTS, SLOTS_WITH_MORE = 4, 2
# Tensors per launch of adamw_norm.
NORM_SLOTS = 7


@metal_kernel("adamw_step", passed=("seed",), keyed=("grad_scale",))
def step(p: Program, a: Arguments) -> Any:
    if any(t.dtype not in MSL_TYPE for t in a.params):
        return NotImplemented
    has_most, is_scaled = bool(a.max_exp_avg_sqs), a.grad_scale != 1
    lists = [a.params, a.grads, a.exp_avgs, a.exp_avg_sqs]
    lists += [a.max_exp_avg_sqs] if has_most else []
    used = [[_dense(p, t) for t in given] for given in lists]
    unused = {d: p.new((4,), d) for d in {t.dtype for t in a.params + a.exp_avgs}}
    counted = p.number(_counted, a.steps)
    norm = p.new((1,)) if a.grad_norm is None else p.dense(a.grad_norm, torch.float32)
    sign, unscale = -1.0 if a.maximize else 1.0, 1 / a.grad_scale
    settings = (a.lr, a.beta1, a.beta2, a.eps, a.weight_decay, a.max_norm)
    threads = p.policy["threads"]
    size = SLOTS_WITH_MORE if has_most or is_scaled else SLOTS
    for variant, places in _alike(used).items():
        for batch in _batches(places, size):
            tensors = [[given[k] for k in batch] for given in used]
            sizes = [t.numel for t in tensors[0]]
            groups = [-(-n // (4 * threads)) for n in sizes]
            numbers = p.number(partial(_numbers, batch, sign, unscale), counted, *settings)
            fixed = (*_filled(sizes, 0, SLOTS), *_filled(_starts(groups), sum(groups), SLOTS))
            table = p.number(partial(_table, batch, fixed), counted, a.seed)
            is_random = a.stochastic and tensors[0][0].dtype == torch.bfloat16
            flags = (has_most, is_scaled, a.grad_norm is not None, is_random)
            args: list[Any] = [*_slots(tensors, unused, is_scaled), norm, numbers, table]
            p.launch(FILE, "adamw_step", (*variant, *flags), args, sum(groups) * threads, threads)
    for k, count in enumerate(a.steps):
        p.fill(count, p.number(itemgetter(k), counted))
    for i, (given, mine) in enumerate(zip(lists, used, strict=True)):
        if i != 1 or is_scaled:
            _copy_back(p, given, mine)
    return None


def _slots(
    tensors: list[list[Buffer]], unused: dict[torch.dtype, Buffer], is_scaled: bool
) -> Iterator[Buffer]:
    """What a launch reads and what it writes, for all slots."""
    params, grads, m, v, *most = tensors
    beside: list[Buffer] = most[0] if most else []
    for given, more in ((params, []), (grads, []), (m, []), (v, beside)):
        yield from _in_slots(given, more, given[0])
    new_grads = grads if is_scaled else []
    for given, more in ((params, new_grads), (m, []), (v, beside)):
        yield from _in_slots(given, more, unused[given[0].dtype])


def _in_slots(given: list[Buffer], more: list[Buffer], stand_in: Buffer) -> list[Buffer]:
    """Buffers of the tensors, what they need beside, and something in the slots left."""
    if more:
        given = [*_filled(given, stand_in, SLOTS_WITH_MORE), *more]
    return _filled(given, stand_in, SLOTS)


def _copy_back(p: Program, given: list[Buffer], used: list[Buffer]) -> None:
    """Store what the kernels could not write in place."""
    for a, b in zip(given, used, strict=True):
        if a is not b:
            p.copy(a, b)


def _dense(p: Program, t: Buffer) -> Buffer:
    """`t` as kernels take it; bytes of moments have to be aligned to an int."""
    if t.dtype == torch.uint8 and not t.is_aligned:
        return p.copy(p.new_like(t), t)
    return p.dense(t)


def _alike(used: list[list[Buffer]]) -> dict[tuple[str | int, ...], list[int]]:
    """The places of tensors that may share a launch: by types and by the width of accesses."""
    found: dict[tuple[str | int, ...], list[int]] = {}
    for k, tensors in enumerate(zip(*used, strict=True)):
        if tensors[0].numel:
            is_small = tensors[2].dtype == torch.uint8
            wide = all(t.is_aligned for t in (tensors[:2] if is_small else tensors))
            moment = "uchar" if is_small else "float"
            variant = (MSL_TYPE[tensors[0].dtype], moment, 4 if wide else 1)
            found.setdefault(variant, []).append(k)
    return found


def _counted(steps: Sequence[Tensor]) -> list[float]:
    return [float(s) + 1 for s in steps]


def _numbers(
    batch: list[int],
    sign: float,
    unscale: float,
    counted: list[float],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    max_norm: float,
) -> tuple[float, ...]:
    """What a launch computes with: for all its tensors, then for each slot."""
    numbers = [counted[k] for k in batch]
    sizes = [lr / (1 - beta1**n) for n in numbers]
    roots = [1 / math.sqrt(1 - beta2**n) for n in numbers]
    common = (1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, eps, sign, unscale, max_norm)
    return *common, *_filled(sizes, 0.0, SLOTS), *_filled(roots, 0.0, SLOTS)


def _table(
    batch: list[int], fixed: tuple[int, ...], counted: list[float], seed: int
) -> tuple[int, ...]:
    seeds = [_seed(seed, counted[k], k) for k in batch]
    return *fixed, *_filled(seeds, 0, SLOTS)


def _seed(seed: int, number: float, place: int) -> int:
    return (seed * 0x9E3779B9 + place * 0xC2B2AE35 + int(number) * 0x85EBCA6B) % (1 << 32)


def _batches(places: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(places), size):
        yield places[start : start + size]


def _starts(groups: list[int]) -> list[int]:
    return [sum(groups[:k]) for k in range(len(groups))]


def _filled(values: list[Any], rest: Any, slots: int) -> list[Any]:
    return [*values, *[rest] * (slots - len(values))]


@metal_kernel("adamw_norm")
def norm(p: Program, a: Arguments) -> Any:
    if any(g.dtype not in MSL_TYPE for g in a.grads):
        return NotImplemented
    used, norm = [p.dense(g) for g in a.grads], p.new(())
    values, threads = p.policy["values_per_sum"], p.policy["threads"]
    # one sum after the other in the order of the list, whatever launch they are of
    groups_of = [-(-g.numel // values) for g in used]
    first_sums, count = _starts(groups_of), sum(groups_of)
    if count == 0:
        return p.fill(norm, 0.0)
    sums = p.new((count,))
    alike: dict[tuple[str | int, ...], list[int]] = {}
    for k, g in enumerate(used):
        if g.numel:
            alike.setdefault((MSL_TYPE[g.dtype], 4 if g.is_aligned else 1), []).append(k)
    for variant, places in alike.items():
        for batch in _batches(places, NORM_SLOTS):
            tensors, groups = [used[k] for k in batch], [groups_of[k] for k in batch]
            table = (
                *_filled([g.numel for g in tensors], 0, NORM_SLOTS),
                *_filled(_starts(groups), sum(groups), NORM_SLOTS),
                *_filled([first_sums[k] for k in batch], 0, NORM_SLOTS),
            )
            args = (*_filled(tensors, tensors[0], NORM_SLOTS), sums, values, table)
            p.launch(FILE, "adamw_norm", variant, args, sum(groups) * threads, threads)
    lanes = min(threads, round_up(count, SIMD_WIDTH))
    p.launch(FILE, "adamw_norm_total", (), (sums, norm, count), lanes, lanes)
    return norm
