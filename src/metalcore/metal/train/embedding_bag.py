# SPDX-License-Identifier: MIT
"""Launches of embedding_bag and embedding_bag_backward."""

import torch
from torch import Tensor

from metalcore._check import refuse_index
from metalcore._policy import Values
from metalcore.metal.launch import (
    MSL_TYPE,
    SIMD_WIDTH,
    Call,
    Launch,
    Planned,
    metal_kernel,
    round_up,
)

FILE = "train/embedding_bag.metal"
_MAX = 2


def _starts(
    indices: Tensor, offsets: Tensor | None, bag_size: int, include_last_offset: bool
) -> Tensor:
    """Where each bag begins, and where the last one ends: [bags + 1]."""
    n = indices.numel()
    if offsets is None:
        return torch.arange(0, n + 1, bag_size, device=indices.device)
    ends = offsets if include_last_offset else torch.cat((offsets, offsets.new_full((1,), n)))
    return ends.contiguous()


def _grid(policy: Values, columns: int, rows: int) -> tuple[tuple[int, int, int], ...]:
    """Threads and group for a thread per column and row."""
    lanes = min(policy["threads"], round_up(columns, SIMD_WIDTH))
    return (round_up(columns, lanes), rows, 1), (lanes, 1, 1)


def _width(n: int, *tensors: Tensor) -> int:
    return 4 if n % 4 == 0 and all(t.storage_offset() % 4 == 0 for t in tensors) else 1


@metal_kernel("embedding_bag")
def plan_forward(
    policy: Values,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    bag_size: int,
    mode: int,
    padding_idx: int,
    include_last_offset: bool,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> Planned | None:
    if weight.dtype not in MSL_TYPE:
        return None
    weight, indices = weight.contiguous(), indices.contiguous()
    starts = _starts(indices, offsets, bag_size, include_last_offset)
    bags, (rows, n) = max(0, starts.numel() - 1), weight.shape
    y = weight.new_empty((bags, n))
    places = indices.new_empty((bags, n) if mode == _MAX else 0)
    if indices.numel() == 0:
        return [], (y.zero_(), places.fill_(-1))
    wrong = torch.zeros(1, dtype=torch.int32, device=weight.device)
    width = _width(n, weight)
    launches = []
    if y.numel():
        factors = weight if per_sample_weights is None else per_sample_weights.contiguous()
        threads, group = _grid(policy, n // width, bags)
        launches.append(
            Launch(
                FILE,
                "embedding_bag",
                f"{MSL_TYPE[weight.dtype]}_{width}",
                (
                    *(weight, indices, starts, factors, y, places if places.numel() else indices),
                    *(wrong, bags, rows, n // width, mode, padding_idx),
                    int(per_sample_weights is not None),
                ),
                threads=threads,
                group=group,
            )
        )
    return [*launches, Call(_refuse, (indices, rows, wrong))], (y, places)


def _refuse(indices: Tensor, rows: int, wrong: Tensor) -> None:
    place = int(wrong.item())
    if place:
        refuse_index("embedding_bag", int(indices[place - 1]), f"a table of {rows} rows")


@metal_kernel("embedding_bag_backward")
def plan_backward(
    policy: Values,
    dy: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    places: Tensor,
    bag_size: int,
    mode: int,
    padding_idx: int,
    include_last_offset: bool,
    scale_grad_by_freq: bool,
    need_per_sample: bool,
) -> Planned | None:
    if weight.dtype not in MSL_TYPE:
        return None
    dy, weight, indices, places = (t.contiguous() for t in (dy, weight, indices, places))
    (rows, n), device = weight.shape, weight.device
    dweight = torch.empty_like(weight)
    dper_sample = dy.new_zeros(indices.numel() if need_per_sample else 0)
    starts = _starts(indices, offsets, bag_size, include_last_offset)
    end = int(starts[-1]) if include_last_offset and starts.numel() else indices.numel()
    if dy.numel() == 0 or end == 0:
        return [], (dweight.zero_(), dper_sample)
    # each place's bag, the count of its bag, and the places in the order of their rows
    used = indices[:end]
    bag_of = torch.searchsorted(starts, torch.arange(end, device=device), right=True) - 1
    counts = torch.zeros(starts.numel() - 1, dtype=torch.int64, device=device)
    counts = counts.index_add(0, bag_of, (used != padding_idx).long())
    rows_in_order, order = torch.sort(used, stable=True)
    first = torch.searchsorted(rows_in_order, torch.arange(rows + 1, device=device))
    factors = weight if per_sample_weights is None else per_sample_weights.contiguous()
    width = _width(n, dy, weight)
    variant = f"{MSL_TYPE[weight.dtype]}_{width}"
    threads, group = _grid(policy, n // width, rows)
    launches = [
        Launch(
            FILE,
            "embedding_bag_backward",
            variant,
            (
                *(dy, order, first, bag_of, counts[bag_of], factors),
                *(places if mode == _MAX else order, dweight, n // width, mode, padding_idx),
                *(int(per_sample_weights is not None), int(scale_grad_by_freq)),
            ),
            threads=threads,
            group=group,
        )
    ]
    if need_per_sample:
        args = (dy, weight, indices, bag_of, first, dper_sample, end, n // width, padding_idx)
        launches.append(
            Launch(
                FILE,
                "embedding_bag_factor",
                variant,
                (*args, int(scale_grad_by_freq)),
                threads=(round_up(end * SIMD_WIDTH, policy["threads"]), 1, 1),
                group=(policy["threads"], 1, 1),
            )
        )
    return launches, (dweight, dper_sample)
