# SPDX-License-Identifier: MIT
"""Keys and values of `tokens` new tokens, 8 heads of 128, into pages of 16 in any order."""

import torch
from torch import Tensor

import metalcore
from metalcore.ops.attention._eight_bit import encoded

from ..harness import Bench, nbytes

_HEADS, _SIZE, _PAGE = 8, 128, 16


def _inputs(tokens: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    k, v = (torch.randn(tokens, _HEADS, _SIZE, dtype=dtype) for _ in range(2))
    caches = (torch.zeros(tokens // _PAGE, _PAGE, _HEADS, _SIZE, dtype=dtype) for _ in range(2))
    return k, v, *caches, torch.randperm(tokens)


def _run(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> list[Tensor]:
    metalcore.paged_write(k, v, k_cache, v_cache, slots)
    return [k_cache, v_cache]


def _torch(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> list[Tensor]:
    for x, cache in ((k, k_cache), (v, v_cache)):
        cache.view(-1, _HEADS, _SIZE).index_copy_(0, slots, x)
    return [k_cache, v_cache]


def _eight_bit_inputs(tokens: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    k, v, *_, slots = _inputs(tokens, dtype)
    pages = tokens // _PAGE
    caches = (torch.zeros(pages, _PAGE, _HEADS, _SIZE, dtype=torch.int8) for _ in range(2))
    return k, v, *caches, *(torch.zeros(pages, _PAGE, _HEADS) for _ in range(2)), slots


def _eight_bit(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    slots: Tensor,
) -> list[Tensor]:
    metalcore.paged_write(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)
    return [k_scale, v_scale]


def _torch_eight_bit(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    slots: Tensor,
) -> list[Tensor]:
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        codes, each = encoded(x, torch.int8, has_scale=True)
        cache.view(-1, _HEADS, _SIZE).index_copy_(0, slots, codes)
        scale.view(-1, _HEADS).index_copy_(0, slots, each.to(scale.dtype))
    return [k_scale, v_scale]


_SWEEP = ({"tokens": 16}, {"tokens": 512}, {"tokens": 4096})
_BENCH = Bench(
    op="attention/paged_write",
    run=_run,
    peers={"torch": _torch},
    inputs=_inputs,
    sweep=_SWEEP,
    dtypes=(torch.float32, torch.bfloat16),
    truth=_torch,
    reduces_over=lambda *_: 1,
    bytes_moved=lambda k, v, *_: 2 * nbytes(k, v),
)
_EIGHT_BIT = Bench(
    op="attention/paged_write",
    kind="int8",
    run=_eight_bit,
    peers={"torch": _torch_eight_bit},
    inputs=_eight_bit_inputs,
    sweep=_SWEEP,
    dtypes=(torch.float32, torch.bfloat16),
    truth=_torch_eight_bit,
    reduces_over=lambda *_: 1,
    bytes_moved=lambda k, v, k_cache, v_cache, *_: nbytes(k, v, k_cache, v_cache),
)
BENCHES = (_BENCH, _EIGHT_BIT)
