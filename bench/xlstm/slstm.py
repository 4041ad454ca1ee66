# SPDX-License-Identifier: MIT
"""sLSTM over a sequence, four heads of 64 for eight batch entries."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes

_BATCH, _HEADS, _SIZE = 8, 4, 64


def _inputs(length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    x = torch.randn(_BATCH, length, 4, _HEADS, _SIZE)
    recurrent = torch.randn(_HEADS, _SIZE, 4, _SIZE) / _SIZE**0.5 / 2
    return x.to(dtype), recurrent.to(dtype), torch.randn(_HEADS, 4, _SIZE).to(dtype)


def _torch(x: Tensor, recurrent: Tensor, bias: Tensor) -> Tensor:
    """Step by step, as the vanilla cell of NX-AI's package does it."""
    y, c, n, m = (x.new_zeros(x.shape[0], *x.shape[3:]) for _ in range(4))
    found = []
    weights, shift = recurrent.flatten(2), bias.transpose(0, 1)
    for t in range(x.shape[1]):
        product = (y[:, :, None] @ weights).unflatten(3, (4, -1))[:, :, 0].transpose(1, 2)
        i, f, z, o = (x[:, t] + product + shift).unbind(1)
        kept = F.logsigmoid(f) + m
        m = i if t == 0 else torch.maximum(i, kept)
        add, keep = (i - m).exp(), (kept - m).exp()
        c, n = keep * c + add * z.tanh(), keep * n + add
        y = o.sigmoid() * c / n
        found.append(y)
    return torch.stack(found, 1)


_BENCH = Bench(
    op="xlstm/slstm",
    run=metalcore.slstm,
    peers={"torch": _torch},
    inputs=_inputs,
    sweep=tuple({"length": n} for n in (128, 512)),
    dtypes=(torch.float32,),
    truth=_torch,
    reduces_over=lambda x, recurrent, bias: x.shape[1] * _SIZE,
    bytes_moved=lambda x, recurrent, bias: nbytes(x, x[:, :, 0], recurrent, bias),
    plot_over="length",
)
BENCHES = (_BENCH, replace(_BENCH, backward=True))
