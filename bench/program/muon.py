# SPDX-License-Identifier: MIT
"""Steps of Muon on matrices [n, n], as many as `matrices`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, Built


def _steps(kind: Callable[..., torch.optim.Optimizer]) -> Built:
    """Steps on copies of the parameters; the result is that of the first one."""

    def build(*inputs: Tensor) -> Callable[..., Sequence[Tensor]]:
        params = [torch.nn.Parameter(x.detach().float()) for x in inputs]
        for p in params:
            p.grad = p.detach().flip(0)
        optimizer = kind(params)
        first: list[list[Tensor]] = []

        def step(*_: Tensor) -> Sequence[Tensor]:
            optimizer.step()
            if not first:
                first.append([p.detach().clone() for p in params])
            return first[0]

        return step

    return Built(build)


def _inputs(matrices: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(n, n, dtype=dtype) for _ in range(matrices)]


BENCHES = (
    Bench(
        op="program/muon",
        run=_steps(metalcore.MetalMuon),
        peers={"torch": _steps(torch.optim.Muon)},
        inputs=_inputs,
        sweep=[{"matrices": c, "n": n} for c, n in ((24, 128), (12, 256), (4, 512), (1, 1024))],
        dtypes=[torch.float32],
        truth=lambda *inputs: _steps(torch.optim.Muon).build(*inputs)(),
        # a step of 1e-3, of which bfloat16 leaves two digits
        reduces_over=lambda *inputs: 16 * inputs[0].shape[0] ** 2,
    ),
)
