# SPDX-License-Identifier: MIT
"""Residual add and LayerNorm on every backend."""

import pytest
import torch
import torch.nn.functional as F

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend
from tests.check import check_op, check_registration

CASES = [
    # x shape, why
    ((4, 64), "one simdgroup per row"),
    ((19, 31), "odd rows, more than a threadgroup takes"),
    ((2, 5, 1025), "an odd row of a whole threadgroup"),
    ((2, 4099), "an odd row that registers do not hold"),
    ((1, 16400), "a row that more registers hold"),
    ((1, 33000), "a row that registers do not hold"),
    ((7,), "one dimension"),
    ((0, 64), "no rows"),
    ((3, 0), "no columns"),
]


@pytest.mark.parametrize("size", [c[0] for c in CASES], ids=[c[1] for c in CASES])
def test_matches_reference(backend: Backend, size: tuple[int, ...]) -> None:
    for dtype in backend.dtypes:
        for weight_dtype in {dtype, torch.float32}:
            x, residual = (backend.randn(*size, dtype=dtype) for _ in range(2))
            weight, bias = (backend.randn(size[-1], dtype=weight_dtype) for _ in range(2))
            check_op(
                backend,
                "add_layer_norm",
                (x, residual, weight, bias, 1e-2),
                reduces_over=size[-1],
                gradient_reduces_over=max(size[-1], x.numel() // max(1, size[-1])),
            )


def test_without_weights(backend: Backend) -> None:
    x, residual = backend.randn(3, 65), backend.randn(3, 65)
    check_op(backend, "add_layer_norm", (x, residual, None, None, 1e-5), reduces_over=65)


@pytest.mark.parametrize("n", [63, 1000, 4099])
def test_a_row_of_equal_values_becomes_the_bias(backend: Backend, n: int) -> None:
    bias = backend.randn(n)
    x, one = bias.new_full((2, n), 123456.7), bias.new_ones(2, n)
    for y in (
        metalcore.layer_norm(x, (n,), None, bias),
        metalcore.add_layer_norm(x, one, None, bias)[0],
    ):
        assert error(y, bias.expand(2, n)) <= tolerance("layer_norm", y.dtype, n)
    mean = metalcore.fused_add_layernorm(x, one, None, None)[1]
    assert torch.equal(mean, (x + one)[:, 0])


def test_equals_torch(backend: Backend) -> None:
    x, residual = backend.randn(6, 33), backend.randn(6, 33)
    weight, bias = backend.randn(33), backend.randn(33)
    y, total = metalcore.add_layer_norm(x, residual, weight, bias)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, F.layer_norm(x + residual, (33,), weight, bias))


def test_seed_spelling_returns_the_statistics(backend: Backend) -> None:
    x, residual = backend.randn(6, 33), backend.randn(6, 33)
    y, mean, rstd = metalcore.fused_add_layernorm(x, residual, None, None)
    total = (x + residual).cpu()
    torch.testing.assert_close(y.cpu(), F.layer_norm(total, (33,)))
    torch.testing.assert_close(mean.cpu(), total.mean(-1))
    torch.testing.assert_close(rstd.cpu(), (total.var(-1, correction=0) + 1e-5).rsqrt())


def test_derivatives_and_registration() -> None:
    x, weight, bias = torch.randn(3, 5), torch.randn(5), torch.randn(5)
    check_registration("add_layer_norm", (x, x + 1, weight, bias, 1e-2))


def test_compiles_without_graph_breaks() -> None:
    compiled = torch.compile(metalcore.add_layer_norm, fullgraph=True, backend="aot_eager")
    x, residual = torch.randn(4, 33), torch.randn(4, 33)
    expected = torch.ops.metalcore.add_layer_norm(x, residual, None, None, 1e-5)[:2]
    torch.testing.assert_close(compiled(x, residual), expected, rtol=0, atol=0)


x8 = torch.randn(2, 8)
BAD = [
    (
        lambda: metalcore.add_layer_norm(x8, x8[:1]),
        ValueError,
        "add_layer_norm: residual must have the shape [2, 8], got [1, 8]",
    ),
    (
        lambda: metalcore.fused_add_layernorm(x8, x8.double()),
        TypeError,
        "fused_add_layernorm: all of these must have one dtype, got x float32 and "
        "residual float64; convert with .to()",
    ),
    (
        lambda: metalcore.add_layer_norm(x8, x8, eps=-1.0),
        ValueError,
        "add_layer_norm: eps must be greater than 0, got -1.0",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
