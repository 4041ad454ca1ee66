# SPDX-License-Identifier: MIT
"""What the tests of kl_div and jsd share."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import metalcore
from metalcore._op import Op
from tests.backends import Backend

CASES = [
    # shape, why
    ((5, 100), "wide accesses"),
    ((3, 33), "odd"),
    ((3, 4099), "several runs, odd"),
    ((0, 8), "nothing"),
]


def log_probabilities(backend: Backend, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return backend.randn(*size).log_softmax(-1).to(dtype)


def arguments(
    backend: Backend, size: tuple[int, ...], parameter: Any, target: Any
) -> Iterator[tuple[Any, ...]]:
    """Arguments of an op in each dtype, summed and not; `target` makes one of a dtype."""
    for dtype in backend.dtypes:
        x = log_probabilities(backend, *size, dtype=dtype)
        for reduce in (True, False):
            yield x, target(dtype), parameter, reduce, 0.25


def check_transforms(name: str, parameter: Any, target: Tensor) -> None:
    """torch.compile and vmap of the public function."""
    x = torch.randn(3, 40).log_softmax(-1).requires_grad_()
    op = Op.all[name]

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return op(x * 2, target, parameter, True, 0.5) + getattr(metalcore, name)(x, target)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, target), loss(x, target))
    (dx,) = torch.autograd.grad(compiled(x, target), x)
    torch.testing.assert_close(dx, *torch.autograd.grad(loss(x, target), x))
    each = torch.stack([loss(a, t) for a, t in zip(x, target, strict=True)])
    torch.testing.assert_close(torch.func.vmap(loss)(x, target), each)
