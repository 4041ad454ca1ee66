# SPDX-License-Identifier: MIT
"""Cross entropy of logits [rows, classes]."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

import metalcore

from ..harness import Bench, Built, Function, nbytes

# the last one takes 10 GB to check
_POINTS = ((1, 10), (8, 1000), (64, 16384), (64, 32000), (256, 128256), (2048, 128256))


def _inputs(rows: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, classes, dtype=dtype), torch.randint(0, classes, (rows,))


def _with_gradient(loss_of: Function, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.detach().requires_grad_()
    loss = loss_of(logits, target)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


def _overwritten(x: Tensor, target: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """Works on a copy: right the first time, when it is checked, and as fast each time."""
    logits = x.clone()

    def loss_of(logits: Tensor, target: Tensor) -> Tensor:
        return metalcore.cross_entropy(logits, target, inplace_backward=True)

    return lambda x, target: _with_gradient(loss_of, logits, target)


def _torch(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return _with_gradient(functional.cross_entropy, x, target)


def _bench(
    run: Function | Built,
    peer: Function,
    points: tuple[tuple[int, int], ...],
    passes: int,
    *,
    backward: bool = False,
    kind: str = "",
) -> Bench:
    return Bench(
        op="train/cross_entropy",
        run=run,
        peers={"torch": peer},
        inputs=_inputs,
        sweep=tuple({"rows": rows, "classes": classes} for rows, classes in points),
        dtypes=(torch.float32, torch.bfloat16),
        truth=peer,
        reduces_over=lambda x, target: x.shape[-1],
        bytes_moved=lambda x, target: passes * nbytes(x),
        backward=backward,
        kind=kind,
        compiled_at=None if kind else {"rows": 64, "classes": 32000},
    )


BENCHES = (
    _bench(metalcore.cross_entropy, functional.cross_entropy, _POINTS[:-1], 1),
    # logits in, their gradient out, both in the forward pass
    _bench(metalcore.cross_entropy, functional.cross_entropy, _POINTS, 2, backward=True),
    _bench(Built(_overwritten), _torch, _POINTS[2:], 2, kind="in place"),
)
