# SPDX-License-Identifier: MIT
"""LayerNorm of eight heads of 128, [1, length, 8, 128]."""

import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes


def _inputs(length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch.randn(1, length, 8, 128).to(dtype), torch.randn(1024).to(dtype)


def _torch(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6).flatten(2) * weight


_BENCH = Bench(
    op="xlstm/multi_head_norm",
    run=metalcore.multi_head_norm,
    peers={"torch": _torch},
    inputs=_inputs,
    sweep=tuple({"length": n} for n in (256, 4096)),
    dtypes=(torch.float32,),
    truth=_torch,
    reduces_over=lambda x, weight: 128,
    bytes_moved=lambda x, weight: nbytes(x, x, weight),
    plot_over="length",
)
BENCHES = (_BENCH,)
