# SPDX-License-Identifier: MIT
"""torch's function, by ours: every argument, torch's meaning and strides, what stays torch's."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend

OP = "scaled_dot_product_attention"
Sizes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
# heads, queries and keys that differ; one head, one query, three dimensions, values of another size
SIZES: list[Sizes] = [
    ((2, 4, 6, 16), (2, 4, 9, 16), (2, 4, 9, 16)),
    ((2, 4, 9, 16), (2, 4, 6, 16), (2, 4, 6, 16)),
    ((2, 4, 7, 16), (2, 2, 7, 16), (2, 2, 7, 16)),
    ((1, 1, 5, 16), (1, 1, 5, 16), (1, 1, 5, 16)),
    ((2, 4, 1, 16), (2, 4, 8, 16), (2, 4, 8, 16)),
    ((3, 5, 16), (3, 8, 16), (3, 8, 16)),
    ((2, 4, 5, 16), (2, 4, 8, 16), (2, 4, 8, 12)),
]


def options(q: Tensor, k: Tensor) -> Iterator[dict[str, Any]]:
    queries, keys = q.shape[-2], k.shape[-2]
    visible = torch.rand(queries, keys) < 0.7
    yield {}
    yield {"is_causal": True, "scale": 0.3}
    yield {"attn_mask": visible.to(q.device)}
    yield {"attn_mask": torch.randn(queries, keys).to(q.device, q.dtype)}
    yield {"attn_mask": (torch.rand(*q.shape[:-1], keys) < 0.7).to(q.device)}
    yield {"attn_mask": visible[:1].to(q.device)}


def layouts(q: Tensor) -> Iterator[Tensor]:
    yield q
    yield q.transpose(-2, -3).contiguous().transpose(-2, -3)
    yield torch.stack([q, q, q], -2).flatten(-2)[..., : q.shape[-1]]
    yield q.mT.contiguous().mT


def strides(x: Tensor) -> tuple[int, ...]:
    return tuple(s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_results_and_strides_are_torchs(sizes: Sizes) -> None:
    q, k, v = (torch.randn(s) for s in sizes)
    gqa = q.shape[-3] != k.shape[-3]
    for how in options(q, k):
        for given in layouts(q):
            truth = F.scaled_dot_product_attention(given, k, v, enable_gqa=gqa, **how)
            with metalcore.trace() as t:
                found = metalcore.scaled_dot_product_attention(given, k, v, enable_gqa=gqa, **how)
            assert set(t.paths) == {"attention"}
            assert error(found, truth) <= tolerance(OP, torch.float32, 25)
            assert strides(found) == strides(truth), (how, given.stride())


def test_gradients(backend: Backend) -> None:
    inputs = [backend.randn(*s) for s in SIZES[0]]
    for how in list(options(*inputs[:2]))[:3]:
        grads = []
        for function in (F.scaled_dot_product_attention, metalcore.scaled_dot_product_attention):
            leaves = [
                x.double() if function is F.scaled_dot_product_attention else x.clone()
                for x in inputs
            ]
            for x in leaves:
                x.requires_grad_()
            y = function(*leaves, **how)
            grads.append(torch.autograd.grad(y, leaves, torch.ones_like(y)))
        for truth, found in zip(*grads, strict=True):
            assert error(found, truth) <= tolerance(OP, torch.float32, 25)


def test_the_name_of_the_original() -> None:
    assert metalcore.metal_scaled_dot_product_attention is metalcore.scaled_dot_product_attention


def _torchs(q: Tensor, k: Tensor) -> Iterator[tuple[Callable[..., Any], bool]]:
    """Calls that stay torch's, and whether they are errors."""
    yield lambda f: f(q, k, k, dropout_p=0.5), False
    yield lambda f: f(q, k[:1], k[:1]), False
    yield lambda f: f(q, k, k, torch.zeros(q.shape[2], k.shape[2], requires_grad=True)), False
    yield lambda f: f(q[..., :0, :], k, k), False
    yield lambda f: f(q, k[:, :3], k[:, :3]), True
    yield lambda f: f(q, k, k.double()), True
    yield lambda f: f(q, k, k, torch.zeros(3, 3)), True
    yield lambda f: f(q, k, k, torch.zeros(q.shape[2], k.shape[2], dtype=torch.int32)), True


def test_what_is_torchs_and_its_errors() -> None:
    q, k = torch.randn(2, 4, 6, 16), torch.randn(2, 4, 9, 16)
    for call, is_wrong in _torchs(q, k):
        torch.manual_seed(0)
        if is_wrong:
            with pytest.raises(RuntimeError) as theirs:
                call(F.scaled_dot_product_attention)
            with pytest.raises(RuntimeError) as ours:
                call(metalcore.scaled_dot_product_attention)
            assert str(ours.value) == str(theirs.value)
            continue
        truth = call(F.scaled_dot_product_attention)
        torch.manual_seed(0)
        with metalcore.trace() as t:
            assert torch.equal(call(metalcore.scaled_dot_product_attention), truth)
        assert t.paths == {OP: {"torch"}}


def test_compiled() -> None:
    q, k = torch.randn(2, 4, 6, 16), torch.randn(2, 4, 9, 16)
    run = torch.compile(metalcore.scaled_dot_product_attention, fullgraph=True, backend="eager")
    truth = F.scaled_dot_product_attention(q, k, k, is_causal=True)
    assert error(run(q, k, k, is_causal=True), truth) <= tolerance(OP, torch.float32, 25)
