# SPDX-License-Identifier: MIT
"""Programs of embedding_bag and embedding_bag_backward."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from metalcore._check import expect, refuse_index
from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import MSL_TYPE, SIMD_WIDTH, Arguments, Buffer, Program, round_up
from metalcore.metal.train._elementwise import in_neighbours

FILE = "train/embedding_bag.metal"
_MEAN, _MAX = 1, 2


class Bags(NamedTuple):
    """How indices are divided, as kernels take it."""

    number: int
    has_offsets: bool
    args: tuple[Buffer, int, int, int]
    """The offsets, their number, that of the indices, and the size of bags without offsets."""

    @classmethod
    def of(cls, p: Program, a: Arguments, indices: Buffer) -> "Bags":
        count = indices.numel
        if a.offsets is None:
            return cls(count // a.bag_size, False, (indices, 0, count, a.bag_size))
        given = a.offsets.numel
        bags = max(0, given - 1) if a.include_last_offset else given
        return cls(bags, True, (p.dense(a.offsets), given, count, 0))


@metal_kernel("embedding_bag")
def forward(p: Program, a: Arguments) -> tuple[Buffer, Buffer]:
    weight, indices = p.dense(a.weight), p.dense(a.indices)
    bags, (rows, n) = Bags.of(p, a, indices), weight.shape
    y = p.new((bags.number, n), weight.dtype)
    places = p.new((bags.number, n) if a.mode == _MAX else (0,), torch.int64)
    if indices.numel == 0:
        return p.fill(y, 0.0), p.fill(places, -1)
    if y.numel:
        # an index out of range, and an offset
        wrong = p.fill(p.new((2,), torch.int32), 0)
        factors = weight if a.per_sample_weights is None else p.dense(a.per_sample_weights)
        out = places if a.mode == _MAX else p.new((1,), torch.int64)
        width = _width(n, weight)
        chunks = n // width
        buffers = (weight, indices, factors, y, out, wrong)
        args = (*buffers, rows, chunks, a.padding_idx, *bags.args)
        variant = (
            *(MSL_TYPE[weight.dtype], width, a.mode),
            *(bags.has_offsets, a.per_sample_weights is not None),
        )
        p.launch(FILE, "embedding_bag", variant, args, *in_neighbours(p, (chunks, bags.number, 1)))
        p.check(partial(_refuse, rows), wrong, indices)
    return y, places


def _refuse(rows: int, wrong: Tensor, indices: Tensor) -> None:
    place, is_offset = wrong.tolist()
    count = indices.shape[0]
    expect(
        not is_offset,
        "embedding_bag",
        f"offsets must begin with 0, must not fall, and must not be past the {count} indices",
    )
    if place:
        refuse_index("embedding_bag", int(indices[place - 1]), f"a table of {rows} rows")


@metal_kernel("embedding_bag_backward")
def backward(p: Program, a: Arguments) -> tuple[Buffer, Buffer]:
    dy, weight, indices = p.dense(a.dy), p.dense(a.weight), p.dense(a.indices)
    bags, (rows, n), count = Bags.of(p, a, indices), weight.shape, indices.numel
    dweight = p.new_like(weight)
    dper_sample = p.new((count if a.need_per_sample else 0,), dy.dtype)
    if dy.numel == 0 or count == 0:
        return p.fill(dweight, 0.0), p.fill(dper_sample, 0.0)
    bag_of, rows_of = p.new((count,), torch.int64), p.new((count,), torch.int64)
    flag, threads = bags.has_offsets, p.policy["threads"]
    args = (indices, bag_of, rows_of, bags.number, rows, *bags.args)
    p.launch(FILE, "embedding_bag_places", (flag,), args, round_up(count, threads), threads)
    in_order, order = p.sort(rows_of)
    first = p.new((rows + 1,), torch.int64)
    of_rows = (in_order, first, rows, count)
    p.launch(FILE, "embedding_bag_rows", (), of_rows, round_up(rows + 1, threads), threads)
    used = bag_of
    if a.mode == _MEAN:
        used = p.new((bags.number,), torch.int64)
        of_bags = (indices, used, bags.number, a.padding_idx, *bags.args)
        p.launch(
            FILE, "embedding_bag_used", (flag,), of_bags, round_up(bags.number, threads), threads
        )
    width, has_factors = _width(n, dy, weight), a.per_sample_weights is not None
    chunks, variant = n // width, (MSL_TYPE[weight.dtype], width)
    factors = p.dense(a.per_sample_weights) if has_factors else weight
    places = p.dense(a.places) if a.mode == _MAX else order
    sums = (dy, order, first, bag_of, used, factors, places, dweight, chunks, a.padding_idx)
    flags = (a.mode, has_factors, a.scale_grad_by_freq)
    p.launch(
        FILE,
        "embedding_bag_backward",
        (*variant, *flags),
        sums,
        *in_neighbours(p, (chunks, rows, 1)),
    )
    if a.need_per_sample:
        dots = (dy, weight, rows_of, bag_of, first, dper_sample, count, rows, chunks, a.padding_idx)
        of_places = (round_up(count * SIMD_WIDTH, threads), threads)
        p.launch(FILE, "embedding_bag_factor", (*variant, a.scale_grad_by_freq), dots, *of_places)
    return dweight, dper_sample


def _width(n: int, *buffers: Buffer) -> int:
    return 4 if n % 4 == 0 and all(b.is_aligned for b in buffers) else 1
