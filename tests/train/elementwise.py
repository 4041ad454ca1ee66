# SPDX-License-Identifier: MIT
"""Checks that every elementwise function passes: any layout, transforms, compilers, hard values."""

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import FLOATS, Backend

Function = Callable[..., Tensor]

CASES = [
    # shape, why
    ((4, 64), "whole registers and chunks of four"),
    ((3, 31), "an odd number of values"),
    ((2, 5, 1030), "more than one threadgroup and one run"),
    ((7,), "one dimension"),
    ((1, 1), "one value"),
    ((0, 64), "no rows"),
    ((3, 0), "no columns"),
]
each_case = pytest.mark.parametrize("size", [c[0] for c in CASES], ids=[c[1] for c in CASES])

# More than 4 MiB, which is written past the caches.
LARGE = (520, 2048)


def check_equals_torch(op: str, ours: Function, theirs: Function, inputs: int) -> None:
    """Small and large, contiguous and not: torch's values, dtype and layout, and its gradient."""
    for dtype in FLOATS:
        for size in ((5, 8, 9), (2, 3, 81, 70)):
            args = [torch.randn(size).to(dtype) for _ in range(inputs)]
            layouts: list[Callable[[Tensor], Tensor]] = [
                lambda x: x,
                lambda x: x.mT,
                _channels_last,
            ]
            for layout in layouts[: 1 if size == LARGE else 3]:
                leaves = [layout(a).detach().requires_grad_() for a in args]
                doubles = [a.detach().double().requires_grad_() for a in leaves]
                y, like, truth = ours(*leaves), theirs(*leaves), theirs(*doubles)
                assert y.dtype == dtype
                assert y.stride() == like.stride()
                assert error(y, truth) <= tolerance(op, dtype, 1)
                dy = torch.randn_like(truth)
                grads = torch.autograd.grad(y, leaves, dy.to(dtype))
                true_grads = torch.autograd.grad(truth, doubles, dy.to(dtype).double())
                for a, b in zip(grads, true_grads, strict=True):
                    assert error(a, b) <= tolerance(op, dtype, 1)


def _transposed(x: Tensor) -> Tensor:
    return x.mT


def _channels_last(x: Tensor) -> Tensor:
    return x.movedim(-1, 1).contiguous().movedim(1, -1)


def check_path(op: str, ours: Function, inputs: int) -> None:
    """Small inputs stay in the caches, large ones go past them, and the trace says so."""
    for size, variant in (((2, 8), "vector"), (LARGE, "streamed")):
        args = [torch.randn(size, requires_grad=True) for _ in range(inputs)]
        with metalcore.trace() as t:
            y = ours(*args)
            y.backward(args[0].detach())
        truth = ours(*(a.detach().double() for a in args))
        assert error(y, truth) <= tolerance(op, torch.float32, 1)
        assert [r.op for r in t.records] == [op, f"{op}_backward"]
        assert {r.path.split(":")[0] for r in t.records} == {"cpu"}
        assert {r.variant for r in t.records} == {variant}


def check_hard_values(
    backend: Backend,
    op: Function,
    truth: Function,
    inputs: int,
    infinities: tuple[float, float] = (inf, nan),
) -> None:
    """Tiny and huge numbers give the truth in float64, NaN gives NaN, and inf and -inf give
    `infinities`: the limit, and x * 0 for -inf where that is the formula, as torch has it."""
    hard = [1e-30, -1e-42, 0.0, -0.0, 88.0, -88.0, -90.0, 104.0, -104.0, 1e4, -1e4, 1e30, -1e30]
    for dtype in backend.dtypes:
        x = torch.tensor([[nan, inf, -inf, *hard]] * 5, device=backend.device).to(dtype)
        args = [x, *(torch.full_like(x, 0.75) for _ in range(inputs - 1))]
        expected = truth(*(a.cpu().double() for a in args))
        expected[:, :3] = torch.tensor([nan, *infinities])
        torch.testing.assert_close(op(*args).cpu(), expected.to(dtype), equal_nan=True)


def check_compiles(ours: Function, inputs: int, *, by_inductor: bool = False) -> None:
    """Without graph breaks, with gradients."""
    args = [torch.randn(40, 500, requires_grad=True) for _ in range(inputs)]
    y = ours(*args)
    grads = torch.autograd.grad(y.square().sum(), args)
    for backend in ("aot_eager", *(["inductor"] if by_inductor else [])):
        compiled = torch.compile(ours, fullgraph=True, backend=backend)
        torch.testing.assert_close(compiled(*args), y)
        torch.testing.assert_close(torch.autograd.grad(compiled(*args).square().sum(), args), grads)
        torch._dynamo.reset()


def check_transforms(backend: Backend, ours: Function, inputs: int) -> None:
    """vmap over any dimension, and per-sample gradients, without a call per sample."""
    args = [backend.randn(90, 3, 61) for _ in range(inputs)]
    whole = ours(*args)
    for dim in (0, 1, 2):
        mapped = torch.func.vmap(ours, in_dims=dim, out_dims=dim)(*args)
        torch.testing.assert_close(mapped, whole)
    if inputs > 1:
        mapped = torch.func.vmap(ours, in_dims=(0, *(None,) * (inputs - 1)))
        first = [a[0] for a in args[1:]]
        torch.testing.assert_close(
            mapped(args[0], *first), ours(args[0], *(f.expand(90, 3, 61) for f in first))
        )
    grads: Any = torch.func.vmap(torch.func.grad(lambda *a: ours(*a).square().sum()))(*args)
    leaf = args[0].clone().requires_grad_()
    (truth,) = torch.autograd.grad(ours(leaf, *args[1:]).square().sum(), leaf)
    torch.testing.assert_close(grads, truth)


def check_autocast(ours: Function, theirs: Function, inputs: int) -> None:
    """The dtypes of torch, also of mixed inputs."""
    with torch.autocast("cpu", torch.bfloat16):
        for dtypes in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)):
            for size in ((2, 5), (300, 70)):
                args = [torch.randn(size).to(d) for d in dtypes[:inputs]]
                y, expected = ours(*args), theirs(*args)
                assert y.dtype == expected.dtype
                torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
