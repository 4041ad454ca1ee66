# SPDX-License-Identifier: MIT
"""One query of each of 32 heads over `length` keys in pages of 16 in any order, heads of 128.

torch gathers the pages and calls its attention, as transformers does.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore
from metalcore.ops.attention._eight_bit import decoded, encoded

from ..harness import Bench, nbytes

_PAGE = 16


def _inputs(heads: int, key_heads: int, length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    q = torch.randn(1, heads, 1, 128, dtype=dtype)
    pages = length // _PAGE
    k, v = (torch.randn(pages, _PAGE, key_heads, 128, dtype=dtype) for _ in range(2))
    return q, k, v, torch.randperm(pages).int()[None], torch.tensor([length], dtype=torch.int32)


def _torch(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    keys, values = (x[table[0]].flatten(0, 1).transpose(0, 1)[None] for x in (k, v))
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def _eight_bit_inputs(
    heads: int, key_heads: int, length: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    q, k, v, table, lengths = _inputs(heads, key_heads, length, dtype)
    (k, k_scale), (v, v_scale) = (encoded(x, torch.int8, has_scale=True) for x in (k, v))
    return q, k, v, k_scale, v_scale, table, lengths


def _eight_bit(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor, table: Tensor, n: Tensor
) -> Tensor:
    return metalcore.paged_attention(q, k, v, table, n, k_scale=k_scale, v_scale=v_scale)


def _torch_eight_bit(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor, table: Tensor, n: Tensor
) -> Tensor:
    both = (decoded(x, s, q.dtype) for x, s in ((k, k_scale), (v, v_scale)))
    return _torch(q, *both, table, n)


_SIZES: dict[str, Any] = {
    "sweep": tuple(
        {"heads": 32, "key_heads": h, "length": n} for h in (32, 8) for n in (512, 2048, 8192)
    ),
    "dtypes": (torch.float32, torch.bfloat16),
    "plot_over": "length",
}
_BENCH = Bench(
    op="attention/paged_attention",
    run=metalcore.paged_attention,
    peers={"torch": _torch},
    inputs=_inputs,
    truth=_torch,
    reduces_over=lambda q, k, *_: k.shape[0] * _PAGE,
    bytes_moved=lambda q, k, v, *_: nbytes(q, k, v, q),
    **_SIZES,
)
_EIGHT_BIT = Bench(
    op="attention/paged_attention",
    kind="int8",
    run=_eight_bit,
    peers={"torch": _torch_eight_bit},
    inputs=_eight_bit_inputs,
    truth=_torch_eight_bit,
    reduces_over=lambda q, k, *_: k.shape[0] * _PAGE,
    bytes_moved=lambda q, k, v, a, b, *_: nbytes(q, k, v, a, b, q),
    **_SIZES,
)
BENCHES = (_BENCH, _EIGHT_BIT)
