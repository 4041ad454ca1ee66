# SPDX-License-Identifier: MIT
"""RMSNorm over the last dimension, [rows, n]."""

from collections.abc import Callable

import torch
from torch import Tensor

import metalcore
from metalcore._op import Op

from ..harness import Bench, Built, Function, nbytes

_EPS = 1e-6
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SWEEP = tuple(
    {"rows": rows, "n": n}
    for rows, n in ((1, 64), (32, 4096), (1024, 4096), (4096, 4096), (65536, 64))
)


def _inputs(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, n, dtype=dtype), torch.randn(n, dtype=dtype)


def _llama(x: Tensor, weight: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    from transformers.models.llama import modeling_llama  # type: ignore[import-not-found, unused-ignore]

    norm = modeling_llama.LlamaRMSNorm(weight.numel(), _EPS)
    # As a plain attribute, so that the gradient arrives at this tensor and not at a Parameter.
    del norm.weight
    norm.weight = weight  # type: ignore[assignment, unused-ignore]
    return lambda x, _: norm(x)


_PEERS: dict[str, Function | Built] = {
    "torch": lambda x, weight: torch.nn.functional.rms_norm(x, weight.shape, weight, _EPS),
    "transformers": Built(_llama),
}


def _run(x: Tensor, weight: Tensor) -> Tensor:
    return metalcore.rms_norm(x, weight, _EPS)


def _truth(x: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = Op.all["rms_norm"].meaning(x, weight, _EPS, 0.0)[0]
    return y


BENCHES = tuple(
    Bench(
        op="train/rms_norm",
        run=_run,
        peers=_PEERS,
        inputs=_inputs,
        sweep=_SWEEP,
        dtypes=_DTYPES,
        truth=_truth,
        reduces_over=lambda x, weight: max(x.shape),
        # forward: x in, y out, weight once; backward: x and dy in, dx out, weight and dweight
        bytes_moved=lambda x, weight, xs=xs, weights=weights: (
            xs * nbytes(x) + weights * nbytes(weight)
        ),
        backward=backward,
        compiled_at={"rows": 1024, "n": 4096},
    )
    for backward, xs, weights in ((False, 2, 1), (True, 5, 3))
)
