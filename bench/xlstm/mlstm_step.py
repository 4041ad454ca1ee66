# SPDX-License-Identifier: MIT
"""One step of an mLSTM, with a state of [heads, 128, 128]."""

import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore

from ..harness import Bench, Function, nbytes
from ._inputs import native, sequence


def _inputs(heads: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    q, k, v, i, f = (x[:, :, 0] for x in sequence(heads, 1, 128, dtype))
    c, n, m = torch.randn(1, heads, 128, 128), torch.randn(1, heads, 128), torch.randn(1, heads)
    return q, k, v, i, f, c, n, m


def _ours(*args: Tensor) -> Tensor:
    return metalcore.mlstm_step(*args)[0]


def _torch(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c: Tensor, n: Tensor, m: Tensor
) -> Tensor:
    kept = F.logsigmoid(f) + m
    now = torch.maximum(kept, i)
    keep, add = (kept - now).exp(), (i - now).exp()
    key, query = add[..., None] * k, q * q.shape[-1] ** -0.5
    c = keep[..., None, None] * c + key[..., None] * v[..., None, :]
    n = keep[..., None] * n + key
    divisor = torch.maximum((query * n).sum(-1).abs(), (-now).exp()) + 1e-6
    return (query[..., None, :] @ c)[..., 0, :] / divisor[..., None]


def _native() -> dict[str, Function]:
    """mlstm_kernels, which has gates and m as [batch, heads, 1]."""

    def step(run: Function) -> Function:
        return lambda q, k, v, i, f, c, n, m: run(
            q, k, v, i[..., None], f[..., None], c, n, m[..., None]
        )[0]

    found = native("recurrent.native_step", "mlstm_recurrent_step__native")
    return {name: step(run) for name, run in found.items()}


_BENCH = Bench(
    op="xlstm/mlstm_step",
    run=_ours,
    peers={"torch": _torch, **_native()},
    inputs=_inputs,
    sweep=tuple({"heads": n} for n in (4, 32)),
    dtypes=(torch.float32,),
    truth=_torch,
    reduces_over=lambda *args: 128,
    bytes_moved=lambda q, k, v, i, f, c, n, m: nbytes(q, k, v, c, c),
    plot_over="heads",
)
BENCHES = (_BENCH,)
