# SPDX-License-Identifier: MIT
"""One step of AdamW over `tensors` parameters of `n` values each."""

from typing import Any

import torch
from torch import Tensor

import metalcore
from metalcore._op import Op

from ..harness import Bench, Built, nbytes

_LR, _DECAY = 1e-3, 1e-2


def _inputs(tensors: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(n, dtype=dtype) for _ in range(2 * tensors)]


def _optimizer(kind: Any, **settings: Any) -> Built:
    """Steps on copies of the parameters, which are the first half of the inputs.

    Every result is that of the first step, from the same parameters and moments of zero.
    """

    def build(*inputs: Tensor) -> Any:
        half = len(inputs) // 2
        params = [x.detach().clone().requires_grad_() for x in inputs[:half]]
        for p, grad in zip(params, inputs[half:], strict=True):
            p.grad = grad
        optimizer = kind(params, lr=_LR, weight_decay=_DECAY, **settings)
        first: list[list[Tensor]] = []

        def step(*_: Tensor) -> list[Tensor]:
            optimizer.step()
            if not first:
                first.append([p.detach().clone() for p in params])
            return first[0]

        return step

    return Built(build)


def _truth(*inputs: Tensor) -> list[Tensor]:
    half = len(inputs) // 2
    params, grads = ([x.clone() for x in part] for part in (inputs[:half], inputs[half:]))
    moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    steps = [torch.tensor(0.0) for _ in params]
    rest = (_LR, 0.9, 0.999, 1e-8, _DECAY, False, 1.0, None, 0.0, False, 0)
    Op.all["adamw_step"].meaning(params, grads, *moments, [], steps, *rest)
    return params


BENCHES = tuple(
    Bench(
        op="train/adamw_step",
        kind="8-bit states" if bits == 8 else "",
        run=_optimizer(metalcore.MetalAdamW, state_bits=bits),
        peers={
            "torch": _optimizer(torch.optim.AdamW),
            "torch fused": _optimizer(torch.optim.AdamW, fused=True),
        },
        inputs=_inputs,
        sweep=sweep,
        dtypes=dtypes,
        truth=_truth,
        reduces_over=lambda *inputs: 1,
        # p and the moments in and out, the gradient in; moments take 4 bytes, or 1 and a 32nd
        bytes_moved=lambda *inputs, moment=moment: sum(
            3 * nbytes(p) + int(4 * moment * p.numel()) for p in inputs[: len(inputs) // 2]
        ),
    )
    for bits, moment, dtypes, sweep in (
        (
            32,
            4.0,
            (torch.float32, torch.bfloat16),
            (
                {"tensors": 1, "n": 1_000_000},
                {"tensors": 1, "n": 10_000_000},
                {"tensors": 1, "n": 100_000_000},
                {"tensors": 200, "n": 10_000},
                {"tensors": 8, "n": 64},
            ),
        ),
        (8, 132 / 128, (torch.float32,), ({"tensors": 1, "n": 10_000_000},)),
    )
)
