# SPDX-License-Identifier: MIT
"""mLSTM over a sequence, heads of 128."""

from dataclasses import replace

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes
from ._inputs import native, sequence


def _torch(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    """The parallel form, with a matrix of all pairs of steps."""
    length = q.shape[2]
    total = torch.nn.functional.logsigmoid(f).cumsum(-1)
    exponents = total[..., None] - total[..., None, :] + i[..., None, :]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    exponents = exponents.masked_fill(~seen, -torch.inf)
    # a sequence starts with m = 0
    m = torch.maximum(exponents.amax(-1, keepdim=True), total[..., None])
    weights = (q * q.shape[-1] ** -0.5) @ k.mT * (exponents - m).exp()
    divisor = torch.maximum(weights.sum(-1, keepdim=True).abs(), (-m).exp()) + 1e-6
    return weights @ v / divisor


_BENCH = Bench(
    op="xlstm/mlstm_chunkwise",
    run=metalcore.mlstm_chunkwise,
    peers={
        "torch": _torch,
        **native("chunkwise.native", "mlstm_chunkwise__native_autograd", chunk_size=64),
    },
    inputs=lambda length, dtype: sequence(4, length, 128, dtype),
    sweep=tuple({"length": n} for n in (512, 2048)),
    dtypes=(torch.float32,),
    truth=_torch,
    reduces_over=lambda q, k, v, i, f: q.shape[2],
    bytes_moved=lambda q, k, v, i, f: nbytes(q, k, v, i, f, v),
    plot_over="length",
)
BENCHES = (_BENCH, replace(_BENCH, backward=True))
