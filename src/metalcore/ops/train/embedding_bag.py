# SPDX-License-Identifier: MIT
"""Sums, means or maxima of bags of rows of a table: y[b] = sum over i in bag b of w_i table[i]."""

from typing import Any

import torch
from torch import Tensor

from metalcore._check import (
    expect,
    expect_float,
    expect_float_or_none,
    expect_same_device,
    expect_same_dtype,
    expect_shape,
    expect_tensors,
    refuse,
    refuse_index,
    shape,
)
from metalcore._op import Example, Op, accumulate

MODES = {"sum": 0, "mean": 1, "max": 2}

# Without offsets, bags are bag_size indices each. padding_idx is -1 where there is none. places is
# [bags, n] for max: which of the indices had the largest value, -1 in an empty bag; else empty.
_forward = Op(
    "embedding_bag(Tensor weight, Tensor indices, Tensor? offsets, Tensor? per_sample_weights,"
    " int bag_size, int mode, int padding_idx, bool include_last_offset, bool scale_grad_by_freq,"
    " bool sparse) -> (Tensor y, Tensor places)",
    sharding="Vn, K, B, K -> Bn, Bn",
)
backward = Op(
    "embedding_bag_backward(Tensor dy, Tensor weight, Tensor indices, Tensor? offsets,"
    " Tensor? per_sample_weights, Tensor places, int bag_size, int mode, int padding_idx,"
    " bool include_last_offset, bool scale_grad_by_freq, bool need_per_sample)"
    " -> (Tensor dweight, Tensor dper_sample)",
    sharding="Bn, Vn, K, B, K, Bn -> Vn, K",
)


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Equal to `torch.nn.functional.embedding_bag`, with every index checked.

    Args:
        input: int64 or int32 indices into `weight`, [bags, size], or [count] with `offsets`.
        weight: the table, [rows, n], float32, float64, float16 or bfloat16.
        offsets: where each bag begins, [bags].
        max_norm, norm_type: rows that are used are scaled down to this norm first, in place.
        scale_grad_by_freq: divide the gradient of a row by how often it is used.
        mode: "sum", "mean" or "max".
        sparse: give a sparse gradient for `weight`.
        per_sample_weights: factors of the rows, in the shape of `input`; for "sum".
        include_last_offset: the last offset is the end of the last bag.
        padding_idx: a row that counts as absent.

    Returns:
        [bags, n], in the dtype of `weight`. An empty bag is zero.

    Example:
        >>> table = torch.randn(1000, 64)
        >>> y = metalcore.embedding_bag(torch.randint(1000, (8, 20)), table, mode="sum")
    """
    _expect("embedding_bag", input, weight, offsets, mode, per_sample_weights)
    expect(
        mode != "max" or not (scale_grad_by_freq or sparse),
        "embedding_bag",
        "mode='max' goes without scale_grad_by_freq and sparse",
    )
    bag_size = 0
    if input.dim() == 2:
        bag_size = input.shape[1]
        if bag_size == 0:
            offsets = input.new_zeros(input.shape[0], dtype=torch.int64)
        include_last_offset = False
        input = input.reshape(-1)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.reshape(-1)
    padding = -1 if padding_idx is None else padding_idx
    if padding < 0 and padding_idx is not None:
        padding += weight.shape[0]
    indices = input if input.dtype == torch.int64 else input.long()
    if offsets is not None and offsets.dtype != torch.int64:
        offsets = offsets.long()
    if max_norm is not None:
        _renormalise(weight, indices, max_norm, norm_type)
    y: Tensor = _forward(
        *(weight, indices, offsets, per_sample_weights, bag_size, MODES[mode], padding),
        *(include_last_offset, scale_grad_by_freq, sparse),
    )[0]
    return y


def _expect(
    op: str,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    mode: str,
    per_sample_weights: Tensor | None,
) -> None:
    expect_tensors(op, input=input)
    expect_float(op, weight=weight)
    expect_float_or_none(op, per_sample_weights=per_sample_weights)
    if weight.dim() != 2:
        refuse(op, f"weight must have two dimensions, got {shape(weight)}")
    expect_same_device(op, weight=weight, input=input, offsets=offsets)
    if mode not in MODES:
        refuse(op, f"mode must be sum, mean or max, got {mode}")
    expect_shape(op, "per_sample_weights", per_sample_weights, input.shape)
    if per_sample_weights is not None:
        expect_same_dtype(op, weight=weight, per_sample_weights=per_sample_weights)
        if mode != "sum":
            refuse(op, f"per_sample_weights goes with mode='sum', got '{mode}'")
    if input.dim() == 2:
        expect(offsets is None, op, "offsets go with an input of one dimension, got two")
        return
    if input.dim() != 1:
        refuse(op, f"input must have one or two dimensions, got {shape(input)}")
    if offsets is None or offsets.dim() != 1:
        refuse(op, f"offsets must have one dimension, got {shape(offsets)}")


def _renormalise(weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> None:
    if indices.numel():
        low, high = (int(v) for v in indices.aminmax())
        if low < 0 or high >= weight.shape[0]:
            refuse_index(
                "embedding_bag", low if low < 0 else high, f"a table of {weight.shape[0]} rows"
            )
    with torch.no_grad():
        torch.embedding_renorm_(weight, indices, max_norm, norm_type)


def bag_starts(
    indices: Tensor, offsets: Tensor | None, bag_size: int, include_last_offset: bool
) -> Tensor:
    """Where each bag begins, and where the last one ends: [bags + 1]."""
    n = indices.numel()
    if offsets is None:
        return torch.arange(0, n + 1, bag_size, device=indices.device)
    return offsets if include_last_offset else torch.cat((offsets, offsets.new_full((1,), n)))


def _occurrences(
    indices: Tensor, starts: Tensor, padding_idx: int
) -> tuple[Tensor, Tensor, Tensor]:
    """For each index its bag and whether it counts, and how many count in each bag."""
    bags = starts.numel() - 1
    places = torch.arange(indices.numel(), device=indices.device)
    bag = torch.searchsorted(starts, places, right=True) - 1
    keep = (bag >= 0) & (bag < bags) & (indices != padding_idx)
    bag = bag.clamp(0, max(0, bags - 1))
    counts = torch.zeros(bags, dtype=torch.int64, device=indices.device)
    return bag, keep, counts.index_add(0, bag, keep.long()) if bags else counts


@_forward.reference
def _(
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
) -> tuple[Tensor, Tensor]:
    starts = bag_starts(indices, offsets, bag_size, include_last_offset)
    bag, keep, counts = _occurrences(indices, starts, padding_idx)
    rows = accumulate(weight)[indices]
    if per_sample_weights is not None:
        rows = rows * accumulate(per_sample_weights)[:, None]
    y = rows.new_zeros((starts.numel() - 1, weight.shape[1]))
    places = indices.new_empty(0)
    if not len(y):  # indices of no bag
        return y.to(weight.dtype), places.view(y.shape) if mode == MODES["max"] else places
    if mode == MODES["max"]:
        into, empty = bag[:, None].expand_as(rows), (counts == 0)[:, None]
        rows = rows.masked_fill(~keep[:, None], -torch.inf)
        y = y.scatter_reduce(0, into, rows, "amax", include_self=False).masked_fill(empty, 0.0)
        count = indices.numel()
        at = torch.arange(count, device=indices.device)[:, None].expand_as(rows)
        found = torch.where((rows == y[bag]) & keep[:, None], at, count)
        places = torch.full_like(y, count, dtype=torch.int64)
        places = places.scatter_reduce(0, into, found, "amin").masked_fill(empty, -1)
    else:
        y = y.index_add(0, bag, rows * keep[:, None])
        if mode == MODES["mean"]:
            y = y / counts.clamp(min=1)[:, None]
    return y.to(weight.dtype), places


@backward.reference
def _(
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
) -> tuple[Tensor, Tensor]:
    if not len(dy):  # indices of no bag
        return weight.new_zeros(weight.shape), dy.new_zeros(len(indices) if need_per_sample else 0)
    starts = bag_starts(indices, offsets, bag_size, include_last_offset)
    bag, keep, counts = _occurrences(indices, starts, padding_idx)
    factor = keep.to(accumulate(dy).dtype)
    if mode == MODES["mean"]:
        factor = factor / counts.clamp(min=1)[bag]
    if scale_grad_by_freq:
        uses = torch.zeros(weight.shape[0], dtype=torch.int64, device=indices.device)
        factor = factor / uses.index_add(0, indices, keep.long())[indices].clamp(min=1)
    grads = accumulate(dy)[bag] * factor[:, None]
    if mode == MODES["max"]:
        at = torch.arange(indices.numel(), device=indices.device)
        grads = grads * (places[bag] == at[:, None])
    dper_sample = dy.new_empty(0)
    if need_per_sample:
        dper_sample = (grads * accumulate(weight)[indices]).sum(-1).to(dy.dtype)
    if per_sample_weights is not None:
        grads = grads * accumulate(per_sample_weights)[:, None]
    dweight = grads.new_zeros(weight.shape).index_add(0, indices, grads)
    return dweight.to(weight.dtype), dper_sample


backward.differentiate_reference()


def _arguments(dtype: torch.dtype) -> tuple[Any, ...]:
    weight = torch.randn(50, 36).to(dtype)
    offsets = torch.tensor([0, 0, 7, 90])
    return weight, torch.randint(50, (100,)), offsets, torch.randn(100).to(dtype), 0, 0, 3, False


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((*_arguments(dtype), False, False), reduces_over=90)


@backward.example
def _(dtype: torch.dtype) -> Example:
    args = _arguments(dtype)
    dy, places = torch.randn(4, 36).to(dtype), torch.zeros(0, dtype=torch.int64)
    return Example((dy, *args[:4], places, *args[4:], False, True), reduces_over=100)


@backward.example
def _(dtype: torch.dtype) -> Example:
    dy, weight = torch.randn(3, 8).to(dtype), torch.randn(10, 8).to(dtype)
    indices, places = torch.randint(10, (12,)), torch.zeros(0, dtype=torch.int64)
    args = (dy, weight, indices, None, None, places, 4, MODES["mean"], -1, False, False, False)
    return Example(args, reduces_over=12)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    weight, indices, offsets, per_sample_weights, *ctx.rest, ctx.sparse = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(weight, indices, offsets, per_sample_weights, output[1])


@_forward.gradient(save=_save)
def _(ctx: Any, dy: Tensor | None, _: None) -> tuple[Any, ...]:
    weight, indices, offsets, per_sample_weights, places = ctx.saved_tensors
    bag_size, mode, padding_idx, include_last_offset, by_freq = ctx.rest
    dweight = dper_sample = None
    need_weight, _, _, need_per_sample, *_ = ctx.needs_input_grad
    if dy is not None and ctx.sparse and need_weight:
        starts = bag_starts(indices, offsets, bag_size, include_last_offset)
        bag, keep, counts = _occurrences(indices, starts, padding_idx)
        used, bag = indices[keep], bag[keep]
        values = accumulate(dy)[bag]
        if mode == MODES["mean"]:
            values = values / counts[bag][:, None]
        if by_freq:
            values = values / torch.bincount(used, minlength=1)[used][:, None]
        if per_sample_weights is not None:
            values = values * accumulate(per_sample_weights)[keep][:, None]
        dweight = torch.sparse_coo_tensor(
            used[None], values.to(weight.dtype), weight.shape, check_invariants=False
        )
    if dy is not None and ((need_weight and not ctx.sparse) or need_per_sample):
        dense, dper_sample = backward(
            *(dy, weight, indices, offsets, per_sample_weights, places, bag_size, mode),
            *(padding_idx, include_last_offset, by_freq, need_per_sample),
        )
        dweight = dense if dweight is None else dweight
        dper_sample = dper_sample if need_per_sample else None
    return dweight if need_weight else None, None, None, dper_sample, *[None] * 6
