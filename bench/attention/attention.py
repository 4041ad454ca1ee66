# SPDX-License-Identifier: MIT
"""Attention of [batch, heads, length, size]: by causal order, in a window, with a soft cap, with
sinks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore

from ..harness import Bench, Built
from ..mlx.functions import on_arrays

_WINDOW, _CAP = 256, 50.0
# batch, heads, heads of keys, length, size
_SHAPES = ((1, 32, 32, 2048, 128), (1, 32, 8, 2048, 128), (4, 16, 16, 512, 64), (1, 8, 8, 128, 64))
_NAMES = ("batch", "heads", "key_heads", "length", "size")
_DTYPES = (torch.float32, torch.bfloat16)


def _inputs(
    batch: int, heads: int, key_heads: int, length: int, size: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    q = torch.randn(batch, heads, length, size, dtype=dtype)
    k, v = (torch.randn(batch, key_heads, length, size, dtype=dtype) for _ in range(2))
    return q, k, v


def _torch(causal: bool) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    return run


def _ours(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: metalcore.attention(q, k, v, **options)


def by_mlx(mask: str | None = None) -> Built:
    """MLX's own attention, on its CPU device."""

    def attention(of: dict[str, Any]) -> Callable[..., Any]:
        attend = of["theirs"].fast.scaled_dot_product_attention
        return lambda q, k, v: attend(q, k, v, scale=q.shape[-1] ** -0.5, mask=mask)

    return on_arrays(attention)


def _masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    mask = (distance >= 0) & (distance < _WINDOW)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5


def _weighted(scores: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Causal attention as transformers computes it where it has no kernel: the scores of sinks, one
    for each head, are a last column that no value has."""
    keys = v.shape[2]
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, torch.finfo(v.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype)[..., :keys]
    return weights @ v.repeat_interleave(scores.shape[1] // v.shape[1], 1)


def _gemma(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _weighted(torch.tanh(_scores(q, k) / _CAP) * _CAP, v)


def _gpt_oss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _weighted(_scores(q, k), v, _sinks(q))


def _sinks(q: Tensor) -> Tensor:
    return torch.linspace(-1, 1, q.shape[1], dtype=q.dtype)


def _bench(
    kind: str,
    run: Callable[..., Tensor],
    peer: Callable[..., Tensor],
    share: float,
    shapes: tuple[tuple[int, ...], ...] = _SHAPES,
    backward: bool = False,
    **more: Built,
) -> Bench:
    def flops(q: Tensor, k: Tensor, v: Tensor) -> int:
        products = 7 if backward else 2
        return int(products * 2 * q.numel() * k.shape[2] * share)

    return Bench(
        op="attention/attention",
        kind=kind,
        run=run,
        peers={"torch": peer, **more},
        inputs=_inputs,
        sweep=tuple(dict(zip(_NAMES, shape, strict=True)) for shape in shapes),
        dtypes=_DTYPES,
        truth=peer,
        reduces_over=lambda q, k, v: q.shape[-1] + k.shape[2],
        flops=flops,
        backward=backward,
        memory=backward,
    )


_CAUSAL, _FULL = _ours(causal=True), _ours()
# MLX takes half a minute for a long one.
_LONG, _SHORT = _SHAPES[:2], _SHAPES[2:]
BENCHES = (
    _bench("causal", _CAUSAL, _torch(True), 0.5, _LONG),
    _bench("causal", _CAUSAL, _torch(True), 0.5, _SHORT, mlx=by_mlx("causal")),
    _bench("causal", _CAUSAL, _torch(True), 0.5, backward=True),
    _bench("full", _FULL, _torch(False), 1.0, _SHORT, mlx=by_mlx()),
    _bench("full", _FULL, _torch(False), 1.0, _SHORT, backward=True),
    _bench(
        "window of 256",
        _ours(causal=True, window=_WINDOW),
        _masked,
        _WINDOW / 2048,
        _SHAPES[:1],
    ),
    _bench("soft cap", _ours(causal=True, softcap=_CAP), _gemma, 0.5, ((1, 8, 4, 1024, 256),)),
    _bench(
        "sinks",
        lambda q, k, v: metalcore.attention(q, k, v, causal=True, sinks=_sinks(q)),
        _gpt_oss,
        0.5,
        ((1, 64, 8, 1024, 64),),
    ),
)
