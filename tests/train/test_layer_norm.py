# SPDX-License-Identifier: MIT
"""LayerNorm on every backend, and its module."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend
from tests.check import check_op, check_registration
from tests.strategies import dtypes, layouts, shapes
from tests.train import elementwise

CASES = [
    # x shape, why
    ((4, 64), "one simdgroup per row, fewer rows than a threadgroup takes"),
    ((19, 31), "odd rows, more than a threadgroup takes"),
    ((2, 5, 1025), "an odd row of a whole threadgroup"),
    ((70, 36), "more rows than one block of the backward pass takes"),
    ((4100, 4), "blocks of several rows"),
    ((2, 4099), "an odd row that registers do not hold"),
    ((3, 16400), "a row that more registers hold"),
    ((1, 33000), "a row that registers do not hold"),
    ((7,), "one dimension"),
    ((2, 3, 4, 8), "four dimensions"),
    ((1, 1), "one value"),
    ((0, 64), "no rows"),
    ((3, 0), "no columns"),
]
# which of weight and bias there are
WEIGHTS = [(True, True), (True, False), (False, True), (False, False)]


@pytest.mark.parametrize("size", [c[0] for c in CASES], ids=[c[1] for c in CASES])
def test_matches_reference(backend: Backend, size: tuple[int, ...]) -> None:
    for dtype in backend.dtypes:
        x = backend.randn(*size, dtype=dtype)
        weight, bias = (backend.randn(size[-1], dtype=dtype) for _ in range(2))
        rows = x.numel() // max(1, size[-1])
        check_op(
            backend,
            "layer_norm",
            (x, weight, bias, 1e-2),
            reduces_over=size[-1],
            gradient_reduces_over=max(size[-1], rows),
        )


@pytest.mark.parametrize(("has_weight", "has_bias"), WEIGHTS)
@pytest.mark.parametrize("n", [64, 1030])
def test_any_of_weight_and_bias(backend: Backend, n: int, has_weight: bool, has_bias: bool) -> None:
    for dtype in backend.dtypes:
        for weight_dtype in {dtype, torch.float32}:
            x = backend.randn(3, n, dtype=dtype)
            weight = backend.randn(n, dtype=weight_dtype) if has_weight else None
            bias = backend.randn(n, dtype=weight_dtype) if has_bias else None
            check_op(backend, "layer_norm", (x, weight, bias, 1e-5), reduces_over=n)


@pytest.mark.parametrize("n", [31, 64, 4099, 5000])
def test_gradient_of_a_residual(backend: Backend, n: int) -> None:
    for dtype in backend.dtypes:
        for weight_dtype in {dtype, torch.float32}:
            dy, x = backend.randn(3, n, dtype=dtype), backend.randn(3, n, dtype=dtype)
            weight = backend.randn(n, dtype=weight_dtype)
            mean = torch.randn(3, device=x.device) / 9
            rstd = torch.rand(3, device=x.device) + 0.5
            if dtype == torch.float64:
                mean, rstd = mean.double(), rstd.double()
            check_op(
                backend,
                "layer_norm_backward",
                (dy, x, weight, weight, mean, rstd, x, True, True),
                reduces_over=n,
                differentiable=False,
            )


@given(st.data(), shapes(), dtypes)
def test_equals_torch_in_any_layout(
    data: st.DataObject, size: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = data.draw(layouts(torch.randn(size).to(dtype)))
    rank = data.draw(st.integers(1, len(size)))
    shape = size[-rank:]
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    y = metalcore.layer_norm(x, shape, weight, bias, 1e-3)
    truth = F.layer_norm(x.double(), shape, weight.double(), bias.double(), 1e-3)
    assert y.dtype == dtype
    assert error(y, truth) <= tolerance("layer_norm", dtype, torch.Size(shape).numel())


@pytest.mark.parametrize("n", [2000, 9001], ids=["kept", "read again"])
def test_a_large_mean_costs_no_digits(backend: Backend, n: int) -> None:
    x = backend.randn(4, n) + 1000
    y = metalcore.layer_norm(x, (n,))
    truth = F.layer_norm(x.cpu().double(), (n,))
    assert error(y, truth) <= 1000 * tolerance("layer_norm", torch.float32, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e15, 1e-30])
def test_hard_values(backend: Backend, value: float) -> None:
    x = backend.randn(5, 70)
    x[1, 13], x[2] = value, value
    y = torch.ops.metalcore.layer_norm(x, None, None, 1e-5)[0]
    truth = F.layer_norm(x.cpu().double(), (70,))
    torch.testing.assert_close(y.cpu(), truth.float(), equal_nan=True)


def test_large_results_are_written_past_the_caches() -> None:
    for size, variant in (((4, 8), "rows"), (elementwise.LARGE, "rows_streamed")):
        with metalcore.trace() as t:
            metalcore.layer_norm(torch.randn(size), size[-1:])
        assert [r.variant for r in t.records] == [variant]


def test_derivatives_and_registration() -> None:
    x, weight, bias = torch.randn(3, 5), torch.randn(5), torch.randn(5)
    mean, rstd = torch.randn(3), torch.rand(3) + 0.5
    check_registration("layer_norm", (x, weight, bias, 1e-2))
    check_registration("layer_norm", (x, None, bias, 1e-2))
    args = (x, x + 1, weight, bias, mean, rstd, x * 2, True, True)
    check_registration("layer_norm_backward", args)


def test_compiles_without_graph_breaks() -> None:
    norm = metalcore.MetalLayerNorm(500)
    elementwise.check_compiles(norm, 1)


def test_function_transforms(backend: Backend) -> None:
    x, weights = backend.randn(3, 4, 16), backend.randn(3, 16)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return metalcore.layer_norm(x, (16,), weight, weight)

    mapped = torch.func.vmap(norm)(x, weights)
    each = torch.stack([norm(a, w) for a, w in zip(x, weights, strict=True)])
    torch.testing.assert_close(mapped, each)
    per_sample = torch.func.vmap(torch.func.grad(lambda a, w: norm(a, w).square().sum()))
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(
        sum(norm(a, w).square().sum() for a, w in zip(leaf, weights, strict=True)), leaf
    )
    torch.testing.assert_close(per_sample(x, weights), grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_keeps_the_dtypes_of_torch(dtype: torch.dtype) -> None:
    ours, theirs = metalcore.MetalLayerNorm(32), torch.nn.LayerNorm(32)
    with torch.autocast("cpu", torch.bfloat16):
        for rows in (4, 3000):
            x = torch.randn(rows, 32).to(dtype)
            y, expected = ours(x), theirs(x)
            assert y.dtype == expected.dtype
            torch.testing.assert_close(y, expected)


def test_gradient_of_weights_does_not_depend_on_threads() -> None:
    before = torch.get_num_threads()
    x, dy, weight = torch.randn(1000, 257), torch.randn(1000, 257), torch.randn(257)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        leaves = [t.clone().requires_grad_() for t in (x, weight, weight)]
        y = metalcore.layer_norm(leaves[0], (257,), *leaves[1:])
        found.append(torch.autograd.grad(y, leaves, dy))
    torch.set_num_threads(before)
    for grads in found[1:]:
        for a, b in zip(grads, found[0], strict=True):
            assert torch.equal(a, b)


def test_module_is_a_drop_in_for_torch() -> None:
    theirs = torch.nn.LayerNorm((3, 8), eps=1e-3)
    torch.nn.init.normal_(theirs.weight)
    ours = metalcore.MetalLayerNorm((3, 8), eps=1e-3)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5000, 3, 8)
    torch.testing.assert_close(ours(x), theirs(x))
    assert isinstance(ours, torch.nn.LayerNorm)
    assert str(ours) == str(theirs)
    assert metalcore.MetalLayerNorm is metalcore.nn.LayerNorm


x8, w8 = torch.randn(2, 8), torch.randn(8)
BAD = [
    (
        lambda: metalcore.layer_norm(x8, (7,)),
        ValueError,
        "layer_norm: normalized_shape must match the last dimension of x; "
        "got x [2, 8] and normalized_shape [7]",
    ),
    (
        lambda: metalcore.layer_norm(x8, (8,), torch.randn(7)),
        ValueError,
        "layer_norm: weight must have the shape [8], got [7]",
    ),
    (
        lambda: metalcore.layer_norm(x8.long(), (8,)),
        TypeError,
        "layer_norm: x must be float32, float64, float16 or bfloat16, got int64; "
        "convert it with x.float()",
    ),
    (
        lambda: metalcore.layer_norm(x8, (8,), w8, w8.to("meta")),
        ValueError,
        "layer_norm: tensors must be on one device, got x on cpu and bias on meta; "
        "move them with .to()",
    ),
    (
        lambda: metalcore.layer_norm(x8, (8,), eps=0.0),
        ValueError,
        "layer_norm: eps must be greater than 0, got 0.0",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


def test_meta_tensors_have_shapes_alone() -> None:
    x = torch.empty(3, 5, device="meta")
    y = metalcore.layer_norm(x, (5,), torch.empty(5, device="meta"))
    assert (y.device.type, y.shape) == ("meta", x.shape)
