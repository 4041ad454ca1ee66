# SPDX-License-Identifier: MIT
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore._op import Op
from tests.backends import Backend
from tests.check import check_op, check_registration
from tests.strategies import dtypes, layouts, shapes

CASES = [
    # shape, why
    ((4, 64), "one simdgroup per row"),
    ((3, 31), "row shorter than a simdgroup"),
    ((2, 5, 1025), "three dimensions, odd row longer than a threadgroup"),
    ((0, 64), "no rows"),
    ((3, 0), "no columns"),
]


@pytest.mark.parametrize("size", [c[0] for c in CASES], ids=[c[1] for c in CASES])
@pytest.mark.parametrize("with_weight", [True, False], ids=["weight", "no weight"])
def test_matches_reference(backend: Backend, size: tuple[int, ...], with_weight: bool) -> None:
    for dtype in backend.dtypes:
        x, residual = backend.randn(*size, dtype=dtype), backend.randn(*size, dtype=dtype)
        weight = backend.randn(size[-1], dtype=dtype) if with_weight else None
        check_op(backend, "add_rms_norm", (x, residual, weight, 1e-6, 1.0), reduces_over=size[-1])


# Row lengths at which the plan changes its kernel: by what a thread can keep, and by alignment.
@pytest.mark.parametrize("n", [31, 65, 4099, 64, 1000, 16400, 33000])
def test_every_variant(backend: Backend, n: int) -> None:
    for dtype in backend.dtypes:
        x, residual = backend.randn(2, n, dtype=dtype), backend.randn(2, n, dtype=dtype)
        for weight_dtype in {dtype, torch.float32}:
            args = (x, residual, backend.randn(n, dtype=weight_dtype), 1e-6, 0.0)
            check_op(backend, "add_rms_norm", args, reduces_over=n, differentiable=False)


@given(st.data(), shapes(), dtypes)
def test_in_place_equals_out_of_place_in_any_layout(
    data: st.DataObject, size: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = data.draw(layouts(torch.randn(size).to(dtype)))
    residual = data.draw(layouts(torch.randn(size).to(dtype)))
    weight = torch.randn(size[-1:]).to(dtype)
    y, total = metalcore.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    z, rstd = metalcore.fused_add_rmsnorm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(z.nan_to_num(), y.nan_to_num())
    assert rstd.shape == x.shape[:-1]


def test_the_norm_is_that_of_the_rounded_sum(backend: Backend) -> None:
    x = backend.randn(3, 40, dtype=torch.bfloat16)
    residual = backend.randn(3, 40, dtype=torch.bfloat16)
    y, total = metalcore.add_rms_norm(x, residual, None, 1e-6)
    torch.testing.assert_close(y, metalcore.rms_norm(total, None, 1e-6), rtol=0, atol=0)


def test_one_pass_without_gradient_and_two_with(backend: Backend) -> None:
    x, residual, weight = backend.randn(3, 40), backend.randn(3, 40), backend.randn(40)
    with metalcore.trace() as t:
        metalcore.fused_add_rmsnorm(x, residual.clone(), weight)
        metalcore.fused_add_rmsnorm(x, residual.clone(), weight.requires_grad_())
    assert [r.op for r in t.records] == ["add_rms_norm_", "add_rms_norm"]


def test_gradients_through_a_residual_that_is_updated_twice(backend: Backend) -> None:
    values = [backend.randn(3, 24) for _ in range(3)]
    weight = backend.randn(24)

    def layers(a, b, start, weight, add):  # type: ignore[no-untyped-def]
        residual = start * 1.0
        hidden, residual = add(a, residual, weight)
        hidden, residual = add(hidden + b, residual, weight)
        return (hidden * residual).sum()

    def fused(x, residual, weight):  # type: ignore[no-untyped-def]
        return metalcore.fused_add_rmsnorm(x, residual, weight, 1e-5)[0], residual

    def plain(x, residual, weight):  # type: ignore[no-untyped-def]
        total = x + residual
        return torch.nn.functional.rms_norm(total, (24,), weight, 1e-5), total

    leaves = [v.clone().requires_grad_() for v in (*values, weight)]
    truths = [v.cpu().double().requires_grad_() for v in (*values, weight)]
    grads = torch.autograd.grad(layers(*leaves, fused), leaves)
    expected = torch.autograd.grad(layers(*truths, plain), truths)
    for a, b in zip(grads, expected, strict=True):
        assert error(a, b) <= tolerance("add_rms_norm", torch.float32, 24 * 3)


def test_gradient_of_rstd_reaches_the_inputs() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    residual = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    _, rstd = metalcore.fused_add_rmsnorm(x, residual * 1.0, None, 1e-3)
    (dx,) = torch.autograd.grad(rstd.sum(), x)
    total = x + residual
    (expected,) = torch.autograd.grad(torch.rsqrt(total.square().mean(-1) + 1e-3).sum(), x)
    torch.testing.assert_close(dx, expected)


def test_derivatives_and_registration() -> None:
    x, residual, weight = torch.randn(3, 5), torch.randn(3, 5), torch.randn(5)
    check_registration("add_rms_norm", (x, residual, weight, 1e-3, 1.0))
    check_registration("add_rms_norm", (x, residual, None, 1e-3, 0.0))
    check_registration("add_rms_norm_", (x, residual, weight, 1e-3, 0.0), differentiable=False)


def test_compiles_and_updates_the_residual(device: Backend) -> None:
    norm = metalcore.FusedAddRMSNorm(16).to(device.device)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    x, residual = device.randn(3, 16), device.randn(3, 16)
    twin = residual.clone()
    torch.testing.assert_close(compiled(x, residual), norm(x, twin))
    torch.testing.assert_close(residual, twin)


def test_the_same_tensor_as_input_and_residual(backend: Backend) -> None:
    x = backend.randn(3, 40)
    y, total = metalcore.add_rms_norm(x, x, None, 1e-6)
    z, _ = metalcore.fused_add_rmsnorm(x, x, None, 1e-6)
    assert torch.equal(z, y)
    assert torch.equal(x, total)


def test_module_holds_its_weight_and_updates_in_place() -> None:
    norm = metalcore.FusedAddRMSNorm(8, eps=1e-5)
    assert list(norm.state_dict()) == ["weight"]
    x, residual = torch.randn(2, 8), torch.randn(2, 8)
    before = residual.clone()
    with torch.no_grad():
        y = norm(x, residual)
    assert torch.equal(residual, x + before)
    torch.testing.assert_close(y, metalcore.rms_norm(residual, norm.weight, 1e-5))
    assert str(norm) == "FusedAddRMSNorm(8, eps=1e-05)"


x8, w8 = torch.randn(2, 8), torch.randn(8)
BAD = [
    (
        lambda r: metalcore.fused_add_rmsnorm(x8, r[:1], w8),
        ValueError,
        "fused_add_rmsnorm: residual must have the shape [2, 8], got [1, 8]",
    ),
    (
        lambda r: metalcore.fused_add_rmsnorm(x8.half(), r, w8),
        TypeError,
        "fused_add_rmsnorm: all of these must have one dtype, got x float16 and residual float32; "
        "convert with .to()",
    ),
    (
        lambda r: metalcore.fused_add_rmsnorm(x8, r, w8[:7]),
        ValueError,
        "fused_add_rmsnorm: weight must have the shape [8], got [7]",
    ),
    (
        lambda r: metalcore.fused_add_rmsnorm(x8, r, w8, eps=0.0),
        ValueError,
        "fused_add_rmsnorm: eps must be greater than 0, got 0.0",
    ),
    (
        lambda r: metalcore.add_rms_norm(x8, r.to("meta"), w8),
        ValueError,
        "add_rms_norm: tensors must be on one device, got x on cpu and residual on meta; "
        "move them with .to()",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input_is_named_and_changes_nothing(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    residual = torch.randn(2, 8)
    before = residual.clone()
    with pytest.raises(kind) as caught:
        call(residual)
    assert str(caught.value) == message
    assert torch.equal(residual, before)


def test_an_expanded_residual_is_refused_unchanged() -> None:
    storage = torch.randn(1, 8)
    before = storage.clone()
    with pytest.raises(RuntimeError, match="single memory location"):
        metalcore.fused_add_rmsnorm(x8, storage.expand(2, 8), w8)
    assert torch.equal(storage, before)


def test_autograd_knows_that_the_residual_was_written() -> None:
    weight, residual = torch.randn(2, 8, requires_grad=True), torch.randn(2, 8)
    product = weight * residual
    metalcore.fused_add_rmsnorm(x8, residual, w8)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_the_in_place_op_takes_strided_residuals() -> None:
    residual = torch.randn(8, 4).T
    total = x8.repeat(2, 1) + residual
    Op.all["add_rms_norm_"](x8.repeat(2, 1), residual, None, 1e-6, 0.0)
    assert torch.equal(residual, total)
