# SPDX-License-Identifier: MIT
"""torch's sums and other reductions in MLX."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import torch

from metalcore.mlx.exchange import mlx_dtype

aten = torch.ops.aten


def typed(value: mx.array, dtype: torch.dtype | None) -> mx.array:
    return value if dtype is None else value.astype(mlx_dtype(dtype))


def is_integer(x: mx.array) -> bool:
    return not mx.issubdtype(x.dtype, mx.floating)


def _reduction(reduce: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def reduced(
        x: mx.array, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> mx.array:
        axes = None if dim is None or (dim == [] and x.ndim) else dim
        return reduce(typed(x, dtype), axes, keepdims=keepdim)

    return reduced


def _sum(x: mx.array, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> mx.array:
    if dtype is None and (is_integer(x)):
        dtype = torch.int64
    return _reduction(mx.sum)(x, dim, keepdim, dtype=dtype)


TABLE: dict[Any, Callable[..., Any]] = {
    aten.sum: _sum,
    aten.mean: _reduction(mx.mean),
    aten.amax: _reduction(mx.max),
    aten.amin: _reduction(mx.min),
    aten.any: _reduction(mx.any),
    aten.all: _reduction(mx.all),
    aten.prod: _reduction(mx.prod),
    aten.logsumexp: _reduction(mx.logsumexp),
    aten.argmax: _reduction(mx.argmax),
    aten.argmin: _reduction(mx.argmin),
    aten.max.default: lambda x: mx.max(x),
    aten.min.default: lambda x: mx.min(x),
    aten.max.dim: lambda x, dim, keep=False: (mx.max(x, dim, keep), mx.argmax(x, dim, keep)),
}
