# SPDX-License-Identifier: MIT
"""How ggml makes blocks of 32 values from floats, byte by byte, in plain torch.

All steps are in float32, one rounding each: no product is contracted with a sum, and what is added
up is added in the order of the values.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from metalcore.ops.quant._ggml import IQ4_NL, MXFP4, Format

_TINY = 1e-15


def half_bytes(d: Tensor) -> Tensor:
    """[...] as half numbers, [..., 2 bytes]."""
    return d.half()[..., None].view(torch.uint8)


def inverse(d: Tensor) -> Tensor:
    """1 / d, and 0 for 0."""
    return torch.where(d == 0, 0.0, 1 / d)


def ratio(a: float, b: Tensor) -> Tensor:
    """a / b, rounded once: torch multiplies a number by the inverse."""
    return torch.full_like(b, a) / b


def total(terms: Iterable[Tensor]) -> Tensor:
    """The sum of `terms`, one after another."""
    first, *rest = terms
    for term in rest:
        first = first + term
    return first


def in_order(x: Tensor) -> Tensor:
    """The sum over the last dimension, from the first value on."""
    return total(x.unbind(-1))


def largest(x: Tensor) -> Tensor:
    """The value of largest magnitude with its sign, the first one of several; +0 for zeros."""
    at = x.abs().argmax(-1, keepdim=True)
    return x.gather(-1, at).squeeze(-1) + 0.0


def pack_nibbles(q: Tensor) -> Tensor:
    """[..., 32] as [..., 16]: value i and value i + 16 in one byte."""
    return q[..., :16] | q[..., 16:] << 4


def small_blocks(x: Tensor, f: Format) -> Tensor:
    """x [blocks, 32], float32, as bytes [blocks, f.bytes]."""
    match f.name:
        case "q4_0" | "q5_0":
            return _signed(x, 4 if f.name == "q4_0" else 5)
        case "q4_1" | "q5_1":
            return _affine(x, 4 if f.name == "q4_1" else 5)
        case "q8_0":
            d = x.abs().amax(-1) / 127
            q = x * inverse(d)[:, None]
            away = torch.trunc(q.double() + 0.5 * q.sign()).to(torch.int8)
            return torch.cat([half_bytes(d), away.view(torch.uint8)], -1)
        case "iq4_nl":
            return _table_search(x)
        case _:
            return _shared_exponent(x)


def _with_bits(q: Tensor, bits: int) -> list[Tensor]:
    """High bits, if there are five, then nibbles."""
    q = q.to(torch.uint8)
    if bits == 4:
        return [pack_nibbles(q)]
    weight = 1 << torch.arange(8, device=q.device)
    high = ((q >> 4).view(-1, 4, 8) * weight).sum(-1).to(torch.uint8)
    return [high, pack_nibbles(q & 15)]


def _signed(x: Tensor, bits: int) -> Tensor:
    middle = 1 << (bits - 1)
    d = largest(x) / -middle
    q = torch.trunc(x * inverse(d)[:, None] + (middle + 0.5)).clamp(max=2 * middle - 1)
    return torch.cat([half_bytes(d), *_with_bits(q, bits)], -1)


def _affine(x: Tensor, bits: int) -> Tensor:
    least, most = x.amin(-1), (1 << bits) - 1
    d = (x.amax(-1) - least) / most
    q = torch.trunc((x - least[:, None]) * inverse(d)[:, None] + 0.5).clamp(max=most)
    return torch.cat([half_bytes(d), half_bytes(least), *_with_bits(q, bits)], -1)


def _shared_exponent(x: Tensor) -> Tensor:
    most = x.abs().amax(-1)
    # the logarithm in float32, which rounds up to a whole number just below a power of two
    exponent = torch.log2(most.double()).float().floor()
    e = torch.where(most > 0, exponent - 2 + 127, 0).clamp(0, 255).int()
    d = torch.where(e < 2, 0x00200000 << e.clamp(max=1), (e - 1) << 23).view(torch.float32)
    table = torch.tensor(MXFP4, dtype=torch.float32, device=x.device)
    off = (table * d[:, None, None] - x[..., None]).abs()
    q = off.argmin(-1).to(torch.uint8)
    return torch.cat([e.to(torch.uint8)[:, None], pack_nibbles(q)], -1)


def _nearest_in_table(x: Tensor) -> Tensor:
    """The place of the nearest of IQ4_NL, the higher one on a tie."""
    table = torch.tensor(IQ4_NL, dtype=torch.float32, device=x.device)
    above = torch.bucketize(x, table, right=True).clamp(1, 15)
    return torch.where(x - table[above - 1] < table[above] - x, above - 1, above)


def _table_search(x: Tensor) -> Tensor:
    """Of 16 scales, that of the least weighted error; weights are x^2."""
    table = torch.tensor(IQ4_NL, dtype=torch.float32, device=x.device)
    peak, weight = largest(x)[:, None], x * x
    is_zero = peak.abs() < _TINY

    def fit(scale: Tensor) -> tuple[Tensor, Tensor]:
        q = table[_nearest_in_table(scale * x)]
        return in_order(weight * q * x)[:, None], in_order(weight * q * q)[:, None]

    qx, qq = fit(1 / (-peak / IQ4_NL[0]))
    d = torch.where(qq > 0, qx / qq, 0.0)
    best = d * qx
    for step in range(-7, 8):
        qx, qq = fit(ratio(step + IQ4_NL[0], peak))
        better = (qq > 0) & (qx * qx > best * qq)
        d = torch.where(better, qx / qq, d)
        best = torch.where(better, d * qx, best)
    d = torch.where(is_zero, 0.0, d)
    q = _nearest_in_table(inverse(d) * x).to(torch.uint8)
    return torch.cat([half_bytes(d[:, 0]), pack_nibbles(q)], -1)
