# SPDX-License-Identifier: MIT
"""Floats to 4 or 8 bits in groups along a row, and back."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from metalcore._check import expect, expect_float, expect_one_of, is_eager, refuse, shape
from metalcore.ops.quant._groups import expect_group, expect_groups, group_values, packed_bits
from metalcore.ops.quant.quantize_ggml import expect_dtype

METHODS = ("minmax", "hqq", "mlx")


class QuantizedInt4(NamedTuple):
    """A weight [N, columns] in 4 bits: scale * q + bias, or scale * (q - 8) without a bias."""

    packed: Tensor
    """uint8 [N, half of the columns]: value 2 i is in the low half of byte i."""
    scale: Tensor
    """[N, groups]."""
    bias: Tensor | None
    """[N, groups], or none for a symmetric weight."""
    group_size: int
    columns: int


class QuantizedInt8(NamedTuple):
    """A weight [N, columns] in 8 bits: scale * q + bias, or scale * (q - 128) without a bias."""

    packed: Tensor
    """uint8 [N, columns]."""
    scale: Tensor
    """[N, groups]."""
    bias: Tensor | None
    """[N, groups], or none for a symmetric weight."""
    group_size: int
    columns: int


def quantize_int4(
    weight: Tensor, group_size: int = 64, *, symmetric: bool = False, method: str = "minmax"
) -> QuantizedInt4:
    """`weight` in 4 bits, with a scale and a bias for each group of values along a row.

    Args:
        weight: [N, K] of any size, finite. The last group of a row may be shorter.
        group_size: a multiple of 32, up to 256.
        symmetric: no bias; the weight of largest magnitude is exact. Larger errors.
        method: "minmax"; "hqq", which moves the bias to where small weights are met best; or "mlx",
            which makes the same numbers as MLX, in which zero is exact.

    Returns:
        A `QuantizedInt4`. Scales have the dtype of `weight`, float32 for float64.

    Example:
        >>> q = metalcore.quantize_int4(torch.randn(64, 100), 32, method="hqq")
    """
    return QuantizedInt4(*_quantize("quantize_int4", weight, 4, group_size, symmetric, method))


def quantize_int8(
    weight: Tensor, group_size: int = 64, *, symmetric: bool = False, method: str = "minmax"
) -> QuantizedInt8:
    """`weight` in 8 bits; otherwise as `quantize_int4`.

    Args:
        weight: [N, K] of any size, finite.
        group_size, symmetric, method: as for `quantize_int4`.

    Returns:
        A `QuantizedInt8`.

    Example:
        >>> q = metalcore.quantize_int8(torch.randn(64, 100), symmetric=True)
    """
    return QuantizedInt8(*_quantize("quantize_int8", weight, 8, group_size, symmetric, method))


def dequantize_int4(q: QuantizedInt4, dtype: torch.dtype | None = None) -> Tensor:
    """The values of a weight in 4 bits.

    Args:
        q: what `quantize_int4` made.
        dtype: that of the scales, if it is not given.

    Returns:
        [N, columns].

    Example:
        >>> weight = metalcore.dequantize_int4(metalcore.quantize_int4(torch.randn(8, 64)))
    """
    return _dequantize("dequantize_int4", q, 4, dtype)


def dequantize_int8(q: QuantizedInt8, dtype: torch.dtype | None = None) -> Tensor:
    """The values of a weight in 8 bits.

    Args:
        q: what `quantize_int8` made.
        dtype: that of the scales, if it is not given.

    Returns:
        [N, columns].

    Example:
        >>> weight = metalcore.dequantize_int8(metalcore.quantize_int8(torch.randn(8, 64)))
    """
    return _dequantize("dequantize_int8", q, 8, dtype)


def _dequantize(
    op: str, q: QuantizedInt4 | QuantizedInt8, bits: int, dtype: torch.dtype | None
) -> Tensor:
    expect_groups(op, q.packed, q.scale, q.bias, bits, q.group_size, q.columns)
    dtype = q.scale.dtype if dtype is None else dtype
    expect_dtype(op, dtype)
    return group_values(q.packed, q.scale, q.bias, bits, q.group_size, q.columns).to(dtype)


def _quantize(
    op: str, weight: Tensor, bits: int, group: int, symmetric: bool, method: str
) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
    expect_float(op, weight=weight)
    expect_group(op, group)
    expect_one_of(op, "method", method, METHODS)
    expect(not symmetric or method == "minmax", op, f"method {method!r} has no symmetric form")
    if weight.dim() != 2:
        refuse(op, f"weight must be [N, K], got {shape(weight)}")
    weight = weight.detach()
    if is_eager() and weight.is_cpu:
        expect(bool(weight.isfinite().all()), op, "weights must be finite")
    n, columns = weight.shape
    kept = torch.float32 if weight.dtype == torch.float64 else weight.dtype
    whole = columns - columns % group
    rule = _symmetric if symmetric else _RULES[method]
    made = [
        rule(part.float(), (1 << bits) - 1, kept)
        for part in (
            weight[:, :whole].reshape(n, whole // group, group),
            weight[:, whole:].unsqueeze(1),
        )
        if part.shape[-1] and part.shape[1]
    ]
    if not made:
        none = weight.new_empty(n, 0, dtype=kept)
        packed = weight.new_empty(n, 0, dtype=torch.uint8)
        return packed, none, None if symmetric else none.clone(), group, columns
    q = torch.cat([m[0].flatten(1) for m in made], -1)
    scale = torch.cat([m[1] for m in made], -1)
    bias = None if symmetric else torch.cat([m[2] for m in made], -1)
    return packed_bits(q, bits), scale, bias, group, columns


Rule = Callable[[Tensor, int, torch.dtype], tuple[Tensor, Tensor, Tensor]]


def _nearest(w: Tensor, scale: Tensor, bias: Tensor, most: int) -> Tensor:
    """The quants of w for a scale and bias as they are kept."""
    s, b = scale.float()[..., None], bias.float()[..., None]
    q = torch.where(s == 0, 0.0, (w - b) / s)
    return q.round().clamp(0, most).to(torch.uint8)


def _minmax(w: Tensor, most: int, kept: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    least = w.amin(-1)
    scale, bias = ((w.amax(-1) - least) / most).to(kept), least.to(kept)
    return _nearest(w, scale, bias, most), scale, bias


def _symmetric(w: Tensor, most: int, kept: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The value of largest magnitude, whatever its sign, is the one that has no opposite."""
    middle = (most + 1) // 2
    peak = w.gather(-1, w.abs().argmax(-1, keepdim=True))[..., 0]
    scale = (peak / -middle).to(kept)
    return _nearest(w, scale, scale.float() * -middle, most), scale, scale


def _mlx(w: Tensor, most: int, kept: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    low, high = w.amin(-1), w.amax(-1)
    is_low = low.abs() > high.abs()
    scale = ((high - low) / most).clamp(min=1e-7)
    scale = torch.where(is_low, scale, -scale)
    edge = torch.where(is_low, low, high)
    steps = (edge / scale).round()
    scale = torch.where(steps != 0, edge / steps, scale).to(kept)
    bias = torch.where(steps != 0, edge, 0.0).to(kept)
    return _nearest(w, scale, bias, most), scale, bias


def _hqq(w: Tensor, most: int, kept: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Half-quadratic: in turns, the residue is shrunk to its large values, and the zero point is
    the mean that is left. The best of all turns is kept."""
    low = w.amin(-1, keepdim=True)
    range_ = w.amax(-1, keepdim=True) - low
    steps = torch.where(range_ > 0, most / range_, 1.0).clamp(max=2e4)
    zero = -low * steps
    best, best_off = zero, torch.full_like(zero, torch.inf)
    strength, power = 10.0, 0.7
    for _ in range(20):
        q = (w * steps + zero).round().clamp(0, most)
        residue = w - (q - zero) / steps
        off = residue.abs().mean(-1, keepdim=True)
        best = torch.where(off < best_off, zero, best)
        best_off = torch.minimum(off, best_off)
        size = residue.abs()
        shrunk = (size - size.clamp(min=1e-12) ** (power - 1) / strength).clamp(min=0)
        zero = (q - (w - residue.sign() * shrunk) * steps).mean(-1, keepdim=True)
        strength *= 1.01
    scale, bias = (1 / steps)[..., 0].to(kept), (-best / steps)[..., 0].to(kept)
    return _nearest(w, scale, bias, most), scale, bias


_RULES: dict[str, Rule] = {"minmax": _minmax, "mlx": _mlx, "hqq": _hqq}
