# SPDX-License-Identifier: MIT
"""Arrays that torch makes of nothing: zeros, ranges and the like."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import torch

from metalcore.mlx.exchange import mlx_dtype

aten = torch.ops.aten


def _full(like: Any, shape: Any, value: Any = None, *, dtype: Any = None) -> mx.array:
    if isinstance(like, mx.array) and value is None:
        return mx.full(like.shape, shape, mlx_dtype(dtype) if dtype else like.dtype)
    if isinstance(like, mx.array):
        return mx.full(shape, value, mlx_dtype(dtype) if dtype else like.dtype)
    return mx.full(like, shape, mlx_dtype(dtype or torch.get_default_dtype()))


def _filled(value: float) -> Callable[..., mx.array]:
    def made(like: Any, shape: Any = None, *, dtype: Any = None, **_: Any) -> mx.array:
        own = like.dtype if isinstance(like, mx.array) else mlx_dtype(torch.get_default_dtype())
        wanted = mlx_dtype(dtype) if dtype else own
        if shape is None:
            shape = like.shape if isinstance(like, mx.array) else like
        return mx.full(shape, value, wanted)

    return made


TABLE: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.full, aten.new_full, aten.full_like), _full),
    **dict.fromkeys((aten.zeros, aten.new_zeros, aten.zeros_like), _filled(0)),
    **dict.fromkeys((aten.empty, aten.new_empty, aten.empty_like), _filled(0)),
    **dict.fromkeys((aten.ones, aten.new_ones, aten.ones_like), _filled(1)),
    aten.scalar_tensor: lambda v, dtype=None: mx.array(v, mlx_dtype(dtype or torch.float32)),
    aten.eye.default: lambda n, dtype=None: mx.eye(n, dtype=mlx_dtype(dtype or torch.float32)),
    aten.eye.m: lambda n, m, dtype=None: mx.eye(n, m, dtype=mlx_dtype(dtype or torch.float32)),
    aten.arange.default: lambda n, dtype=None: mx.arange(n, dtype=mlx_dtype(dtype or torch.int64)),
    aten.arange.start: lambda a, b, dtype=None: mx.arange(
        a, b, dtype=mlx_dtype(dtype or torch.int64)
    ),
    aten.arange.start_step: lambda a, b, c=1, dtype=None: mx.arange(
        a, b, c, dtype=mlx_dtype(dtype or torch.int64)
    ),
}
