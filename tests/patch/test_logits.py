# SPDX-License-Identifier: MIT
"""Lazy logits: whatever is done to them gives what it gives for the logits, gradients included."""

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore._route import Route
from metalcore.patch.logits import LazyLogits, lazy_linear

CLASSES, WIDTH = 20, 8
TARGET = torch.tensor([[3, 0, 19, -100, 7], [1, 1, 12, 5, -100]])


def _shifted(y: Tensor) -> Tensor:
    return F.cross_entropy(y[..., :-1, :].contiguous().view(-1, CLASSES), TARGET[:, 1:].flatten())


def _capped(y: Tensor) -> Tensor:
    y = torch.tanh(y / 3.0) * 3.0
    return F.cross_entropy(y.float().view(-1, CLASSES), TARGET.view(-1), reduction="sum") / 7


def _per_token(y: Tensor) -> Tensor:
    loss = F.cross_entropy(y.flatten(0, 1), TARGET.flatten(), reduction="none")
    return (loss * torch.arange(10.0)).sum()


LOSSES: list[Callable[[Tensor], Tensor]] = [
    lambda y: F.cross_entropy(y.flatten(0, 1), TARGET.flatten()),
    lambda y: nn.CrossEntropyLoss(label_smoothing=0.1)((y * 0.3).flatten(0, 1), TARGET.flatten()),
    lambda y: F.cross_entropy((y / torch.tensor(4.0)).flatten(0, 1), TARGET.flatten()),
    lambda y: metalcore.cross_entropy(y.flatten(0, 1), TARGET.flatten()),
    _shifted,
    _capped,
    _per_token,
]


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * dy


def _overwritten(y: Tensor) -> Tensor:
    y = y.clone()
    y[:, 0] = 0
    return y.square().sum()


def _penalty(y: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), TARGET.flatten()) + y.logsumexp(-1).square().mean()


OTHER: list[Callable[[Tensor], Tensor]] = [
    lambda y: y.softmax(-1).var(),
    lambda y: (torch.tanh(y) * -2).exp().mean(),
    lambda y: torch.tanh(torch.tanh(y)).sum(),
    lambda y: F.cross_entropy(y.flatten(0, 1), TARGET.flatten(), weight=torch.arange(20.0)),
    lambda y: F.cross_entropy(y.movedim(-1, 1), TARGET),
    lambda y: F.cross_entropy(y.flatten(0, 1), torch.ones(10, CLASSES) / CLASSES),
    lambda y: F.cross_entropy(y[..., :10].flatten(0, 1), TARGET.clamp(max=9).flatten()),
    lambda y: _Square.apply(y).sum(),
    lambda y: (y / y.detach().amax()).sum(),
    _overwritten,
    _penalty,
]


def _results(linear: Callable[..., Tensor], use: Callable[[Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    leaves = [
        torch.randn(s, requires_grad=True) for s in ((2, 5, WIDTH), (CLASSES, WIDTH), CLASSES)
    ]
    hidden, weight, bias = leaves
    y = linear(hidden * 1.5, weight, bias)
    result = use(y)
    return [result, *torch.autograd.grad(result, leaves)]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("use", [*LOSSES, *OTHER])
def test_results_and_gradients_are_those_of_the_logits(
    use: Callable[[Tensor], Tensor], keep: bool
) -> None:
    # ours computes the logits, torch's function is caught
    with Route.all["cross_entropy"].forced(to_torch=not keep), metalcore.trace() as t:
        found = _results(partial(lazy_linear, keep=keep), use)
    op = "cross_entropy" if keep else "cross_entropy_"
    assert [r.op for r in t.records].count(op) == (use in LOSSES or use is _penalty)
    for a, b in zip(found, _results(F.linear, use), strict=True):
        assert type(a) is Tensor
        assert error(a, b) <= tolerance("linear_cross_entropy", torch.float32, CLASSES)


def test_nothing_is_computed_before_somebody_looks() -> None:
    y = lazy_linear(torch.randn(2, 5, WIDTH, requires_grad=True), torch.randn(CLASSES, WIDTH), None)
    assert (y.shape, y.dtype, y.device.type) == ((2, 5, CLASSES), torch.float32, "cpu")
    assert y.requires_grad
    z = y.float().view(-1, CLASSES)[:4]
    assert isinstance(z, LazyLogits)
    assert y._computed is None
    assert z._computed is None
    values = F.linear(y.recipe.hidden, y.recipe.weight)
    assert torch.equal(z, values.view(-1, CLASSES)[:4])
    assert z._computed is not None


def test_kept_logits_are_computed_at_once_and_copies_are_copies() -> None:
    read: list[bool] = []
    hidden, weight = torch.randn(2, 5, WIDTH), torch.randn(CLASSES, WIDTH)
    y = lazy_linear(hidden, weight, None, keep=True, when_read=lambda: read.append(True))
    F.cross_entropy((y * 2).flatten(0, 1), TARGET.flatten())
    assert not read
    for copied in (y.clone(), y.to(torch.float32, copy=True)):
        copied.zero_()
    weight.zero_()
    assert y.count_nonzero() > 0
    assert read


def test_what_torch_refuses_for_tensors_without_memory() -> None:
    y = lazy_linear(torch.randn(2, WIDTH), torch.randn(CLASSES, WIDTH), None)
    values = F.linear(y.recipe.hidden, y.recipe.weight)
    saved = io.BytesIO()
    torch.save(y, saved)
    saved.seek(0)
    for plain in (copy.deepcopy(y), torch.load(saved), torch.from_dlpack(y)):
        assert type(plain) is Tensor
        assert torch.equal(plain, values)
    assert np.array_equal(y.numpy(), values.numpy())
    assert np.array_equal(np.asarray(y), values.numpy())
    assert y.tolist() == values.tolist()
    assert repr(y) == repr(values)


def test_no_gradient_comes_from_logits_without_one() -> None:
    hidden = torch.randn(4, WIDTH, requires_grad=True)
    y = lazy_linear(hidden, torch.randn(CLASSES, WIDTH), None)
    target = torch.arange(4)
    assert not F.cross_entropy(y.detach(), target).requires_grad
    with torch.no_grad():
        assert not F.cross_entropy(y * 2, target).requires_grad
    leaf = y.detach().requires_grad_()
    F.cross_entropy(leaf, target).backward()
    assert leaf.grad is not None
    assert hidden.grad is None


def test_logits_that_were_not_read_in_time_are_an_error() -> None:
    weight = torch.randn(CLASSES, WIDTH, requires_grad=True)
    y = lazy_linear(torch.randn(4, WIDTH), weight, None)
    read = lazy_linear(torch.randn(4, WIDTH), weight, None)
    assert read.sum().isfinite()
    optimizer = metalcore.MetalAdamW([weight])
    F.cross_entropy(y, torch.arange(4)).backward()
    optimizer.step()
    assert read.max().isfinite()
    with pytest.raises(ValueError, match="must be read before its weights change") as caught:
        y.argmax(-1)
    assert str(caught.value).startswith("accelerate: ")
