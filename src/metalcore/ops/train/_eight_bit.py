# SPDX-License-Identifier: MIT
"""Moments of an optimizer in 8 bits, in plain torch.

[blocks, 132] bytes: 128 codes of a tensor's values in order, then the origin of the block, an
int32. A code is the upper bits of a float32, eight steps per power of two, counted from the origin:
a sign and 15 powers of two for the first moment, 31 powers for the second, below the largest value
that can come up. Code 0 of the first moment is zero. Codes of a step are rounded by chance, or
else the second moment would stand still: a step changes it by less than the distance of two codes.
"""

import torch
from torch import Tensor

BLOCK = 128
BLOCK_BYTES = BLOCK + 4

# What a code leaves out of a float32: all but three bits of its mantissa.
_SHIFT = 20


def _largest(signed: bool) -> int:
    return 127 if signed else 255


def blocks_of(x: Tensor) -> int:
    return -(-x.numel() // BLOCK)


def in_blocks(x: Tensor) -> Tensor:
    """The values of `x` as float32 [blocks, 128], with zeros at the end."""
    flat = x.new_zeros(blocks_of(x) * BLOCK, dtype=torch.float32)
    flat[: x.numel()] = x.reshape(-1)
    return flat.view(-1, BLOCK)


def empty_moment(x: Tensor) -> Tensor:
    """A moment of zeros for the values of `x`."""
    return x.new_zeros((blocks_of(x), BLOCK_BYTES), dtype=torch.uint8)


def quantize(
    x: Tensor, signed: bool, bound: Tensor | None = None, noise: Tensor | None = None
) -> Tensor:
    """`x` in 8 bits.

    `bound` is what no value of a block is above, [blocks, 1], by default the largest one. 20 bits
    of `noise` per value round by chance; without any, values are rounded to nearest.
    """
    values = in_blocks(x)
    if bound is None:
        bound = values.abs().amax(1, keepdim=True)
    top = (bound.contiguous().view(torch.int32) + ((1 << _SHIFT) - 1)) >> _SHIFT
    origin = (top - _largest(signed)).clamp(min=0)
    up = 1 << (_SHIFT - 1) if noise is None else noise.view(-1, BLOCK).int()
    codes = ((values.abs().view(torch.int32) + up) >> _SHIFT) - origin
    codes = codes.clamp(0, _largest(signed))
    if signed:
        codes = torch.where(values < 0, -codes, codes) & 0xFF
    return torch.cat((codes.to(torch.uint8), origin.view(torch.uint8)), 1)


def dequantize(moment: Tensor, signed: bool, like: Tensor) -> Tensor:
    """The values of a moment in 8 bits, as float32 in the shape of `like`."""
    codes, origin = moment[:, :BLOCK].int(), _origin(moment)
    if signed:
        codes = torch.where(codes >= 128, codes - 256, codes)
    values = ((codes.abs() + origin) << _SHIFT).view(torch.float32)
    if signed:
        values = torch.where(codes == 0, 0.0, torch.where(codes < 0, -values, values))
    return values.reshape(-1)[: like.numel()].view(like.shape)


def bound_of(moment: Tensor, signed: bool) -> Tensor:
    """What no value of a block is above, [blocks, 1]."""
    return ((_origin(moment) + _largest(signed)) << _SHIFT).view(torch.float32)


def _origin(moment: Tensor) -> Tensor:
    return moment[:, BLOCK:].contiguous().view(torch.int32)


def random_bits(x: Tensor, seed: int, step: Tensor, place: int) -> Tensor:
    """32 random bits per value of `x`, the tensor at `place` of a list: int64 [blocks, 128].

    Within a block they are the places of a sequence that covers the range evenly, from a start
    that is a hash of seed, step, tensor and block.
    """
    blocks, places = (torch.arange(n, device=step.device) for n in (blocks_of(x), BLOCK))
    start = step.long() * 0x85EBCA6B + (seed * 0x9E3779B9 + place * 0xC2B2AE35) % (1 << 32)
    h = (blocks * 0x9E3779B9 + start) & 0xFFFFFFFF
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    h = h ^ (h >> 15)
    return ((h[:, None] + places * 0x9E3779B1) & 0xFFFFFFFF).to(x.device)


def round_by_chance(x: Tensor, bits: Tensor) -> Tensor:
    """float32 `x` rounded to one of the two bfloat16 values around it."""
    chance = (bits & 0xFFFF).reshape(-1)[: x.numel()].view(x.shape)
    raw = x.contiguous().view(torch.int32).long() + chance
    return (raw & 0xFFFF0000).to(torch.int32).view(torch.float32)
