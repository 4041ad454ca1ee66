# SPDX-License-Identifier: MIT
"""Tiles: the bytes of 16 rows side by side, so that each row is a lane of a register.

A field of a block, such as a scale or 4 bytes of quants, stands there for row 0, 1, .. 15, and then
comes the next field. Quants of 32 values are 4 words of nibbles per row, value i and i + 16 in one
byte; before them a word of fifth bits or two words of fifth and sixth ones; or they are 8 words of
bytes. Rows are filled up with zeros.
"""

import torch
from torch import Tensor

from metalcore.ops.quant._ggml import Fields

ROWS = 16


def tile_count(rows: int) -> int:
    return -(-rows // ROWS)


def quant_fields(quants: Tensor, bits: int) -> list[Tensor]:
    """[..., 32] of `bits` bits as fields [..., count, 4 bytes]."""
    if bits == 8:
        return [quants.unflatten(-1, (8, 4))]
    nibbles = (quants[..., :16] & 15 | (quants[..., 16:] & 15) << 4).unflatten(-1, (4, 4))
    if bits == 4:
        return [nibbles]
    # of values 4 j .. 4 j + 3, the high bits stand at bit j (or pairs at bit 2 (j % 4)) of 4 bytes
    words, width = bits - 4, bits - 4
    high = (quants >> 4).int().unflatten(-1, (words, 8 // words, 4))
    place = torch.arange(0, 8, width, device=quants.device, dtype=torch.int32).view(-1, 1)
    return [(high << place).sum(-2).to(torch.uint8), nibbles]


def tiles_of(found: Fields, bits: int) -> Tensor:
    """[tiles, blocks, bytes of 16 blocks], uint8."""
    n, S, P = found.quants.shape[:3]
    parts = [*found.part, *quant_fields(found.quants, bits)]
    made = [_side_by_side(p) for p in parts]
    body = torch.cat(made, -1).reshape(tile_count(n), S, -1) if n * S * P else None
    heads = [_side_by_side(h) for h in found.header]
    if body is None:
        size = sum(t.shape[-2] * t.shape[-1] for t in found.header)
        size += P * sum(t.shape[-2] * t.shape[-1] for t in parts)
        return found.quants.new_empty(tile_count(n), S, ROWS * size)
    return torch.cat([*heads, body], -1)


def _side_by_side(field: Tensor) -> Tensor:
    """[n, ..., count, width] as [tiles, ..., count * 16 * width]."""
    n = field.shape[0]
    missing = tile_count(n) * ROWS - n
    padded = torch.cat([field, field.new_zeros(missing, *field.shape[1:])])
    rows = padded.view(tile_count(n), ROWS, *field.shape[1:])
    return rows.movedim(1, -2).flatten(-3)
