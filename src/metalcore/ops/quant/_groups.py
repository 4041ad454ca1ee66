# SPDX-License-Identifier: MIT
"""Weights in groups along a row: value = scale q + bias, or scale (q - middle) without a bias.

q has 4 bits, of which value 2 i is in the low half of byte i, or it is a byte; the middle is 8 or
128. The last group of a row may be shorter.
"""

import torch
from torch import Tensor

from metalcore._check import FLOATS, dtype_name, expect, refuse, shape
from metalcore._op import accumulate_dtype
from metalcore.ops.quant._ggml import Fields

LARGEST_GROUP = 256


def expect_group(op: str, group_size: int) -> None:
    expect(
        0 < group_size <= LARGEST_GROUP and group_size % 32 == 0,
        op,
        f"group_size must be a multiple of 32 up to {LARGEST_GROUP}, got {group_size}",
    )


def expect_groups(
    op: str,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    group: int,
    columns: int,
) -> None:
    """packed uint8 [N, bytes of `columns` values], scale and bias [N, groups]."""
    expect_group(op, group)
    if packed.dtype != torch.uint8:
        raise TypeError(f"{op}: packed must be uint8, got {dtype_name(packed.dtype)}")
    if columns < 0 or packed.dim() != 2 or packed.shape[1] != -(-columns * bits // 8):
        refuse(op, f"packed must have {bits} bits for {columns} columns, got {shape(packed)}")
    sizes = [packed.shape[0], -(-columns // group)]
    for name, t in (("scale", scale), ("bias", bias)):
        if t is not None and list(t.shape) != sizes:
            refuse(op, f"{name} must have the shape {sizes}, got {shape(t)}")
        if t is not None and (t.dtype not in FLOATS or t.dtype != scale.dtype):
            raise TypeError(f"{op}: scale and bias must be of one floating dtype")


def unpacked(packed: Tensor, bits: int, columns: int) -> Tensor:
    """q, uint8 [N, columns]."""
    if bits == 8:
        return packed
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)[:, :columns]


def packed_bits(q: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return q
    if q.shape[1] % 2:
        q = torch.cat([q, torch.zeros_like(q[:, :1])], -1)
    return q[:, ::2] | q[:, 1::2] << 4


def spread(t: Tensor, group: int, columns: int) -> Tensor:
    """[N, groups] as [N, columns]."""
    return t.repeat_interleave(group, -1)[:, :columns]


def group_values(
    packed: Tensor, scale: Tensor, bias: Tensor | None, bits: int, group: int, columns: int
) -> Tensor:
    """The weights [N, columns], in float32 or float64."""
    dtype = accumulate_dtype(scale)
    q = unpacked(packed, bits, columns).to(dtype)
    s = spread(scale.to(dtype), group, columns)
    if bias is None:
        return (q - (1 << (bits - 1))) * s
    return q * s + spread(bias.to(dtype), group, columns)


def group_sums(
    dweight: Tensor, packed: Tensor, bits: int, group: int, symmetric: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of scale and bias for that of the weights, [N, columns]."""
    n, columns = dweight.shape
    q = unpacked(packed, bits, columns).to(dweight.dtype)
    if symmetric:
        q = q - (1 << (bits - 1))
    missing, groups = -columns % group, -(-columns // group)

    def by_group(t: Tensor) -> Tensor:
        return torch.nn.functional.pad(t, (0, missing)).view(n, groups, group).sum(-1)

    return by_group(dweight * q), None if symmetric else by_group(dweight)


def group_fields(
    packed: Tensor, scale: Tensor, bias: Tensor | None, bits: int, group: int, columns: int
) -> Fields:
    """What a tile holds: a row is filled up to whole groups."""
    n, groups = scale.shape
    q = torch.nn.functional.pad(unpacked(packed, bits, columns), (0, groups * group - columns))
    kept = scale.dtype if scale.dtype.itemsize <= 4 else torch.float32
    heads = [
        t.to(kept).contiguous()[..., None, None].view(torch.uint8)
        for t in (scale, bias)
        if t is not None
    ]
    return Fields(heads, [], q.view(n, groups, group // 32, 32))
