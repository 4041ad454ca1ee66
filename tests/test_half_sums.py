# SPDX-License-Identifier: MIT
"""All that may be is left to torch: sums of half types are in float32 and rounded once even so,
and the same mixtures of dtypes are taken."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore._check import FLOATS
from metalcore._route import Route

HALF = (torch.bfloat16, torch.float16)
# 1020 ones are 256 where bfloat16 adds them up, and 6000 of them 2048 where float16 does
ROWS = ((1020, 33), (6000, 4), (3, 5000), (1, 7))


@pytest.fixture(autouse=True)
def _all_is_left_to_torch(write_policy: Callable[[str], Path]) -> None:
    lines = []
    for route in Route.all.values():
        lines += [f"[{route.name}]", *(f"{kind} = {{ from = inf }}" for kind in route.kinds())]
    write_policy("\n".join(lines))


def _leaf(a: Any, dtype: torch.dtype) -> Any:
    if not isinstance(a, Tensor) or not a.is_floating_point():
        return a
    return a.detach().to(dtype).requires_grad_()


def _targets(rows: int, n: int) -> Tensor:
    return torch.arange(rows) % n


def _cases(rows: int, n: int) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """An op by its route, how it is called, and its arguments: whatever adds up more than two
    values, in a result or in a gradient."""
    m = metalcore
    x, w, b = torch.randn(rows, n), torch.rand(n) + 0.5, torch.randn(n)
    yield "rms_norm", lambda x, w: m.rms_norm(x, w), (x, w)
    yield "layer_norm", lambda x, w, b: m.layer_norm(x, (n,), w, b), (x, w, b)
    yield "add_layer_norm", m.add_layer_norm, (x, torch.zeros(rows, n), w, b)
    yield "softmax", lambda x: m.softmax(x, -1), (x,)
    yield "softmax.across", lambda x: m.softmax(x, 0), (x,)
    yield "silu", m.silu, (x,)
    yield "gelu.none", m.gelu, (x,)
    yield "gelu.tanh", lambda x: m.gelu(x, approximate="tanh"), (x,)
    for how in ({}, {"label_smoothing": 0.3}, {"reduction": "sum"}):
        yield (
            "cross_entropy",
            lambda x, t, w, how=how: m.cross_entropy(x, t, w.detach(), **how),
            (x, _targets(rows, n), w),
        )
    for how in ({}, {"is_causal": True}, {"attn_mask": torch.ones(1, rows, dtype=torch.bool)}):
        case = "mask" if "attn_mask" in how else "causal" if how else "full"
        yield (
            f"scaled_dot_product_attention.{case}",
            lambda x, how=how: m.scaled_dot_product_attention(
                x[None, None, -3:], *2 * [x[None, None]], **how
            ),
            (x,),
        )
    index = torch.zeros(rows, n, dtype=torch.int64)
    yield "gather", lambda x, i: m.gather(x, 0, i), (x, index)
    yield "index_select", lambda x, i: m.index_select(x, 0, i), (x, index[:, 0])
    yield "scatter_add", lambda x, i, s: m.scatter_add(x, 0, i, s), (x, index, torch.ones(rows, n))


def _results(call: Callable[..., Any], args: tuple[Any, ...], dtype: torch.dtype) -> list[Tensor]:
    """Results, then gradients, for positive gradients of the results."""
    leaves = [_leaf(a, dtype) for a in args]
    found = call(*leaves)
    outputs = [found] if isinstance(found, Tensor) else list(found)
    wanted = [a for a in leaves if isinstance(a, Tensor) and a.requires_grad]
    given = [(1 + torch.arange(o.numel()) % 7 / 8).to(o).view(o.shape) for o in outputs]
    grads = torch.autograd.grad(outputs, wanted, given, allow_unused=True, materialize_grads=True)
    return [*outputs, *grads]


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_sums_are_rounded_once(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for name, call, args in _cases(*shape):
        # the same values in float64
        rounded = tuple(
            a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
        )
        truth = _results(call, rounded, torch.float64)
        found = _results(call, rounded, dtype)
        allowed = tolerance(Route.all[name].op, dtype, max(shape))
        for i, (a, b) in enumerate(zip(found, truth, strict=True)):
            assert error(a, b) <= allowed, (name, i)


def test_every_route_of_half_types_is_among_them() -> None:
    known = {name for name, _, _ in _cases(2, 3)}
    # of products, and of a norm and a gate that are here themselves
    known |= {"fused_swiglu_mlp"}
    assert {n for n, r in Route.all.items() if set(HALF) & set(r.dtypes)} == known


@pytest.mark.parametrize("rows", [1, 64, 6000])
def test_mixtures_of_dtypes_are_taken_at_every_size(rows: int) -> None:
    for dtype in FLOATS:
        for other in FLOATS:
            x, w = torch.randn(rows, 33, dtype=dtype), torch.rand(33).to(other)
            for call, args in (
                (metalcore.rms_norm, (x, w)),
                (lambda x, b: metalcore.layer_norm(x, (33,), None, b), (x, w)),
                (lambda x, w: metalcore.layer_norm(x, (33,), w), (x, w)),
                (lambda x, w: metalcore.add_layer_norm(x, x, w, w), (x, w)),
                (lambda x, w: metalcore.cross_entropy(x, _targets(rows, 33), w.detach()), (x, w)),
            ):
                leaves = [a.detach().requires_grad_() for a in args]
                found = call(*leaves)
                y = found if isinstance(found, Tensor) else found[0]
                grads = torch.autograd.grad(y.sum(), leaves, allow_unused=True)
                assert y.dtype == dtype
                assert grads[0].dtype == dtype
                assert grads[1] is None or grads[1].dtype == other
