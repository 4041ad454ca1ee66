# SPDX-License-Identifier: MIT
"""Half of `pages` pages, 16 rows of 8 heads of 128 each, copied into the other half."""

import torch
from torch import Tensor

import metalcore

from ..harness import Bench


def _inputs(pages: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    order = torch.randperm(pages)
    return torch.randn(pages, 16, 8, 128, dtype=dtype), order.view(-1, 2)


def _run(cache: Tensor, pairs: Tensor) -> Tensor:
    metalcore.copy_blocks([cache], pairs)
    return cache


def _torch(cache: Tensor, pairs: Tensor) -> Tensor:
    for source, to in pairs.tolist():
        cache[to] = cache[source]
    return cache


_BENCH = Bench(
    op="attention/copy_blocks",
    run=_run,
    peers={"torch": _torch},
    inputs=_inputs,
    sweep=({"pages": 64}, {"pages": 1024}),
    dtypes=(torch.bfloat16,),
    truth=_torch,
    reduces_over=lambda *_: 1,
    bytes_moved=lambda cache, pairs: cache.nbytes,
)
BENCHES = (_BENCH,)
