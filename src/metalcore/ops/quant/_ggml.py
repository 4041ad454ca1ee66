# SPDX-License-Identifier: MIT
"""The block formats of ggml: where their fields are, and the values they stand for.

A row of K values is a run of blocks. A block has a header, then 1 or 8 parts of 32 values, each
with a sub-header of its own:
    q4_0 q5_0 q8_0    d (q - 8 | 16 | 0)
    q4_1 q5_1         d q + m
    iq4_nl mxfp4      d table[q]
    q4_K q5_K         d scale q - dmin min      scale and min of 32 values, 6 bits each
    q6_K              d scale (q - 32)          scale of 16 values, int8
"""

from typing import NamedTuple

import torch
from torch import Tensor

from metalcore._check import (
    dtype_name,
    expect_one_of,
    expect_rank,
    expect_tensors,
    refuse,
    shape,
)

IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# twice the values of E2M1, whose scale is halved for it
MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class Format(NamedTuple):
    """A type of ggml: its number in files, how many values a block has, and in how many bytes."""

    name: str
    id: int
    values: int
    bytes: int

    @property
    def parts(self) -> int:
        return self.values // 32

    def row_bytes(self, k: int) -> int:
        return k // self.values * self.bytes


FORMATS = {
    f.name: f
    for f in (
        Format("q4_0", 2, 32, 18),
        Format("q4_1", 3, 32, 20),
        Format("q5_0", 6, 32, 22),
        Format("q5_1", 7, 32, 24),
        Format("q8_0", 8, 32, 34),
        Format("q4_K", 12, 256, 144),
        Format("q5_K", 13, 256, 176),
        Format("q6_K", 14, 256, 210),
        Format("iq4_nl", 20, 32, 18),
        Format("mxfp4", 39, 32, 17),
    )
}
BY_ID = {f.id: f for f in FORMATS.values()}


class Fields(NamedTuple):
    """Blocks taken apart, for n rows of S blocks of P parts: bytes as they stand side by side in a
    tile, and the quants as numbers from 0 on."""

    header: list[Tensor]  # each [n, S, count, width]
    part: list[Tensor]  # each [n, S, P, count, width]
    quants: Tensor  # [n, S, P, 32]


def format_of(op: str, type: str) -> Format:
    expect_one_of(op, "type", type, list(FORMATS))
    return FORMATS[type]


def known(op: str, id: int) -> Format:
    """The format of a number that came through the dispatcher."""
    if id not in BY_ID:
        refuse(op, f"type must be one of {', '.join(map(str, BY_ID))}, got {id}")
    return BY_ID[id]


def expect_blocks(op: str, blocks: Tensor, f: Format) -> None:
    """uint8 [..., whole blocks]."""
    expect_tensors(op, blocks=blocks)
    if blocks.dtype != torch.uint8:
        raise TypeError(f"{op}: blocks must be uint8, got {dtype_name(blocks.dtype)}")
    expect_rank(op, blocks, 1)
    if blocks.shape[-1] % f.bytes:
        refuse(op, f"rows of {f.name} are of {f.bytes} bytes per block, got {shape(blocks)}")


def columns(blocks: Tensor, f: Format) -> int:
    """K: how many values a row has."""
    return int(blocks.shape[-1] // f.bytes * f.values)


def halves(b: Tensor) -> Tensor:
    """Pairs of bytes [..., 2] as half numbers [...], in float32."""
    # a copy, since what is empty counts as contiguous at any offset
    return b.clone(memory_format=torch.contiguous_format).view(torch.float16).squeeze(-1).float()


def fields(blocks: Tensor, f: Format) -> Fields:
    """The parts of `blocks`, [n, row bytes]."""
    b = blocks.reshape(blocks.shape[0], blocks.shape[1] // f.bytes, f.bytes)
    if f.name in ("q4_K", "q5_K"):
        return _k_fields(b, f)
    if f.name == "q6_K":
        return _q6_k_fields(b)
    if f.name == "mxfp4":
        return Fields([b[..., None, :1]], [], _nibbles(b[..., 1:]))
    header = 4 if f.name.endswith("_1") else 2
    heads = [b[..., None, i : i + 2] for i in range(0, header, 2)]
    rest = b[..., header:]
    if f.name == "q8_0":
        return Fields(heads, [], (rest ^ 0x80)[..., None, :])
    if f.name.startswith("q5"):
        bits = (rest[..., :4, None] >> torch.arange(8, device=b.device)) & 1
        high = bits.reshape(*b.shape[:2], 1, 32).to(torch.uint8)
        return Fields(heads, [], _nibbles(rest[..., 4:]) | high << 4)
    return Fields(heads, [], _nibbles(rest))


def _nibbles(b: Tensor) -> Tensor:
    """[n, S, 16 bytes] as [n, S, 1, 32]: low halves, then high ones."""
    return torch.cat([b & 15, b >> 4], -1)[..., None, :]


def _k_fields(b: Tensor, f: Format) -> Fields:
    s, n, S = b[..., 4:16], *b.shape[:2]
    scale = torch.cat([s[..., :4] & 63, s[..., 8:] & 15 | s[..., :4] >> 6 << 4], -1)
    least = torch.cat([s[..., 4:8] & 63, s[..., 8:] >> 4 | s[..., 4:8] >> 6 << 4], -1)
    low = b[..., -128:].reshape(n, S, 4, 1, 32)
    quants = torch.cat([low & 15, low >> 4], -2).reshape(n, S, 8, 32)
    if f.name == "q5_K":
        part = torch.arange(8, device=b.device).view(8, 1)
        quants = quants | ((b[..., None, 16:48] >> part) & 1).to(torch.uint8) << 4
    heads = [b[..., None, :2], b[..., None, 2:4]]
    return Fields(heads, [scale[..., None, None], least[..., None, None]], quants)


def _q6_k_fields(b: Tensor) -> Fields:
    n, S = b.shape[:2]
    low, high = b[..., :128].reshape(n, S, 2, 2, 32), b[..., 128:192].reshape(n, S, 2, 1, 32)
    four = torch.cat([low & 15, low >> 4], -2)
    shift = torch.arange(0, 8, 2, device=b.device).view(4, 1)
    two = ((high >> shift) & 3).to(torch.uint8)
    scales = b[..., 192:208].reshape(n, S, 8, 2, 1)
    return Fields([b[..., None, 208:]], [scales], (four | two << 4).reshape(n, S, 8, 32))


def values(found: Fields, f: Format) -> Tensor:
    """What blocks stand for, float32 [n, K]; every value is rounded once at most."""
    q = found.quants.float()
    if f.name == "mxfp4":
        e = found.header[0][..., 0, 0, None, None].int()
        d = torch.where(e < 2, 0x00200000 << e.clamp(max=1), (e - 1) << 23).view(torch.float32)
        return (d * _table(MXFP4, found.quants)).flatten(1)
    d = halves(found.header[0])[..., None]
    match f.name:
        case "q4_1" | "q5_1":
            y = (q.double() * d + halves(found.header[1])[..., None]).float()
        case "iq4_nl":
            y = d * _table(IQ4_NL, found.quants)
        case "q4_K" | "q5_K":
            scale, least = (p[..., 0].float() for p in found.part)
            y = ((d * scale * q).double() - halves(found.header[1])[..., None] * least).float()
        case "q6_K":
            scale = found.part[0].view(torch.int8).float().expand(*q.shape[:3], 2, 16)
            y = d * scale.reshape(q.shape) * (q - 32)
        case _:
            y = d * (q - {"q4_0": 8, "q5_0": 16, "q8_0": 128}[f.name])
    return y.flatten(1)


def _table(numbers: tuple[int, ...], quants: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=quants.device)[quants.int()]


def dequantized(blocks: Tensor, f: Format, dtype: torch.dtype) -> Tensor:
    """`blocks` [..., row bytes] as [..., K]."""
    flat = blocks.reshape(blocks.shape[:-1].numel(), blocks.shape[-1])
    y = values(fields(flat, f), f).to(dtype)
    return y.reshape(*blocks.shape[:-1], columns(blocks, f))
