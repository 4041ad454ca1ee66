# SPDX-License-Identifier: MIT
"""Functions of arrays called in each of their ways, and the truth about what they give."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest
import torch
from torch import Tensor

import metalcore
import metalcore.mlx as on_mlx
from metalcore._accuracy import error, tolerance
from metalcore.mlx import _function, _table
from metalcore.mlx._simulate import TELLS_TEXT
from tests.mlx.cases import Case

needs_text = pytest.mark.skipif(not TELLS_TEXT, reason="MLX before 0.32 tells no Metal text here")
WAYS = ("cpu", pytest.param("sim", marks=needs_text), "mlx")
SIMULATED = pytest.mark.parametrize(
    "simulated", [pytest.param(False, id="cpu"), pytest.param(True, id="sim", marks=needs_text)]
)


@contextmanager
def way(name: str, patch: Any) -> Iterator[None]:
    """Compute by our CPU kernels, by Metal kernels in mslsim, or by MLX's ops as in mx.compile."""
    if name == "sim":
        with metalcore.simulate():
            yield
        return
    # few values are left to MLX's own ops, which tests/mlx/test_own.py calls
    patch.setattr(_function, "by_mlx", lambda *_: None)
    if name == "mlx":
        patch.setattr(_function.Function, "_at_once", lambda *_: None)
    yield


def function(case: Case) -> Callable[..., Any]:
    place: Any = on_mlx
    for part in case.function.split("."):
        place = getattr(place, part)
    return place  # type: ignore[no-any-return]


def _place(case: Case) -> tuple[str, Any]:
    is_precise = case.function.startswith("precise.")
    return case.function.split(".")[-1], _table.PRECISE if is_precise else _table.FUNCTIONS


def original(case: Case) -> Callable[..., Any]:
    return _table.original(*_place(case))


def entry(case: Case) -> _table.Entry:
    name, table = _place(case)
    return table[name]  # type: ignore[no-any-return]


def mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(v, kind, change) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(v, kind, change) for v in value)
    if isinstance(value, dict):
        return {k: mapped(v, kind, change) for k, v in value.items()}
    return value


def leaves(value: Any, kind: type) -> list[Any]:
    found: list[Any] = []
    mapped(value, kind, found.append)
    return found


def floats(value: Any) -> list[int]:
    tensors = leaves(value, Tensor)
    return [i for i, t in enumerate(tensors) if t.is_floating_point()]


def weights(like: Any) -> Tensor:
    """What a loss weighs its terms by."""
    shape = tuple(like.shape)
    n = int(torch.tensor(shape).prod()) if shape else 1
    return torch.cos(torch.arange(n, dtype=torch.float64)).view(shape)


def converted(case: Case, dtype: torch.dtype) -> Case:
    def change(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() else t

    return case._replace(args=mapped(case.args, Tensor, change))


def truth(case: Case) -> tuple[list[Tensor], list[Tensor | None]]:
    """Results and gradients in float64."""

    def plain(t: Tensor) -> Tensor:
        return t.double() if t.is_floating_point() else t

    def leaf(t: Tensor) -> Tensor:
        return t.double().requires_grad_() if t.is_floating_point() else t

    args, named = mapped(
        (case.args, case.named), Tensor, leaf if entry(case).has_gradient else plain
    )
    results = determined(case, original(case)(*args, **named), Tensor)
    with_gradient = [r for r in results if r.requires_grad]
    if not with_gradient:
        return results, []
    inputs = [t for t in leaves((args, named), Tensor) if t.is_floating_point()]
    seeds = [weights(r) for r in with_gradient]
    return results, list(torch.autograd.grad(with_gradient, inputs, seeds, allow_unused=True))


def determined(case: Case, results: Any, kind: type) -> list[Any]:
    return leaves(case.loss(results) if case.loss else results, kind)


def arguments(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    renamed = {"dim": "axis", "keepdim": "keepdims"}
    named = {renamed.get(k, k): v for k, v in case.named.items()}
    return mapped((case.args, named), Tensor, on_mlx.from_torch)  # type: ignore[no-any-return]


def found(case: Case, has_gradient: bool) -> tuple[list[mx.array], list[mx.array]]:
    """Results and gradients by MLX."""
    call = function(case)
    value = arguments(case)
    arrays = leaves(value, mx.array)
    wanted = [i for i, a in enumerate(arrays) if mx.issubdtype(a.dtype, mx.floating)]

    def loss(*given: mx.array) -> tuple[mx.array, list[mx.array]]:
        rest = iter(given)
        args, named = mapped(value, mx.array, lambda _: next(rest))
        results = determined(case, call(*args, **named), mx.array)
        total = mx.array(0.0)
        for r in results:
            if mx.issubdtype(r.dtype, mx.floating):
                total = total + (r * on_mlx.from_torch(weights(r).float()).astype(r.dtype)).sum()
        return total, results

    if not has_gradient or not wanted:
        results = loss(*arrays)[1]
        mx.eval(results)
        return results, []
    (_, results), gradients = mx.value_and_grad(loss, argnums=wanted)(*arrays)
    gradients = list(gradients) if isinstance(gradients, (tuple, list)) else [gradients]
    mx.eval(results, gradients)
    return results, gradients


def compare(case: Case, what: str, results: list[Any], truths: list[Any], over: int) -> None:
    assert len(results) == len(truths)
    for i, (r, t) in enumerate(zip(results, truths, strict=True)):
        ours = on_mlx.to_torch(r)
        if t is None:
            assert not ours.any(), f"{case.function}: {what} {i} is not zero"
            continue
        if not ours.is_floating_point():
            assert torch.equal(ours.long(), t.long()), f"{case.function}: {what} {i} differs"
            continue
        allowed = tolerance(case.op, ours.dtype, over)
        off = error(ours, t)
        assert off <= allowed, f"{case.function}: {what} {i} is off by {off:.2g} > {allowed:.2g}"
