# SPDX-License-Identifier: MIT
"""Rotary embedding with the arguments of MLX."""

from functools import cache
from typing import Any

import mlx.core as mx

from metalcore._check import expect
from metalcore.mlx import _table


def rope(
    x: mx.array,
    dims: int,
    *,
    traditional: bool = False,
    base: float | None = 10000.0,
    scale: float = 1.0,
    offset: int | mx.array = 0,
    freqs: mx.array | None = None,
    stream: Any = None,
) -> mx.array:
    """Rotary embedding, as `mx.fast.rope`.

    Args:
        x: [B, heads, T, D], or [..., T, D].
        dims: how many of the D values are rotated.
        traditional: pairs are neighbours, not half of `dims` apart.
        base: of the frequencies `base^(-2 i / dims)`.
        scale: factor of the positions.
        offset: the position of the first row, or one of each entry of the batch, [B].
        freqs: wave lengths in place of those that follow from `base`, [dims / 2].
        stream: where it is computed.

    Returns:
        x, rotated, in its dtype. Angles are computed in float32.

    Example:
        >>> q = metalcore.mlx.rope(q, 64, base=500000.0, offset=cache.offset)
    """
    expect(x.ndim >= 2, "rope", f"x must have 2 or more dimensions, got {x.ndim}")
    expect((base is None) != (freqs is None), "rope", "give one of base and freqs")
    with mx.stream(mx.default_stream(mx.default_device()) if stream is None else stream):
        cos, sin = _angles(x.shape[-2], dims, base, scale, offset, freqs)
    shape = x.shape
    if x.ndim != 4:
        x = x.reshape(-1, 1, *shape[-2:]) if x.ndim > 2 else x[None, None]
    y = _rotate()(x, cos, sin, interleaved=traditional, rotary_dim=dims, stream=stream)
    return y.reshape(shape)


@cache
def _rotate() -> Any:
    return _table.made("apply_rotary_pos_emb_single")


def _angles(
    length: int,
    dims: int,
    base: Any,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """Cosines and sines, [1 or B, length, dims / 2]."""
    starts = offset.reshape(-1, 1) if isinstance(offset, mx.array) else mx.array([[offset]])
    positions = (starts + mx.arange(length)[None]).astype(mx.float32) * scale
    if freqs is None:
        exponents = mx.arange(0, dims, 2, dtype=mx.float32) / -dims
        turns = mx.power(mx.array(base, mx.float32), exponents)
    else:
        turns = 1.0 / freqs.astype(mx.float32)
    angles = positions[..., None] * turns
    return mx.cos(angles), mx.sin(angles)
