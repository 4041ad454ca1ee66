# SPDX-License-Identifier: MIT
"""Softmax on every backend, with masks, and its module."""

import pytest
import torch
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
    ((2, 3, 1025), "an odd row of a whole threadgroup"),
    ((2, 5000), "a row of more than the threads of the policy"),
    ((1, 4099), "an odd row that is long"),
    ((1, 16400), "a row that more registers hold"),
    ((1, 33000), "a row that registers do not hold"),
    ((1, 28701), "an odd row that registers do not hold"),
    ((1, 28700), "a row that registers do not hold"),
    ((7,), "one dimension"),
    ((1, 1), "one value"),
    ((0, 64), "no rows"),
    ((3, 0), "no columns"),
]


@pytest.mark.parametrize("size", [c[0] for c in CASES], ids=[c[1] for c in CASES])
def test_matches_reference(backend: Backend, size: tuple[int, ...]) -> None:
    for dtype in backend.dtypes:
        x = 3 * backend.randn(*size, dtype=dtype)
        check_op(backend, "softmax", (x, None, 0.7, False), reduces_over=size[-1])


MASKS = [
    # x shape, mask shape
    ((3, 2, 5, 36), (36,)),
    ((3, 2, 5, 36), (5, 36)),
    ((3, 2, 5, 36), (3, 1, 1, 36)),
    ((3, 2, 5, 36), (3, 1, 5, 36)),
    ((2, 2, 3, 2, 33), (2, 1, 3, 1, 33)),
    ((3, 2, 5, 36), (3, 2, 5, 36)),
]


@pytest.mark.parametrize(("size", "mask_size"), MASKS, ids=[str(m[1]) for m in MASKS])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_masks_broadcast(
    backend: Backend, size: tuple[int, ...], mask_size: tuple[int, ...], causal: bool
) -> None:
    x, mask = backend.randn(*size), backend.randn(*mask_size)
    check_op(
        backend,
        "softmax",
        (x, mask, 1.3, causal),
        reduces_over=size[-1],
        gradient_reduces_over=x.numel(),
    )


def test_causal(backend: Backend) -> None:
    for dtype in backend.dtypes:
        for size in ((2, 7, 7), (9, 5), (5, 40), (33, 65)):
            x = backend.randn(*size, dtype=dtype)
            check_op(backend, "softmax", (x, None, 1.0, True), reduces_over=size[-1])
            y = metalcore.softmax(x, causal=True)
            assert (y.triu(1) == 0).all()


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_any_dimension(backend: Backend, dim: int) -> None:
    x, keep = backend.randn(20, 33, 40), torch.rand(20, 1, 40, device=backend.device) > 0.3
    y = metalcore.softmax(x, dim, scale=0.5)
    truth = torch.softmax(x.cpu().double() * 0.5, dim)
    assert error(y, truth) <= tolerance("softmax", torch.float32, x.shape[dim])
    assert y.is_contiguous()
    keep[:, :, :2] = True
    masked = metalcore.softmax(x, dim, mask=keep)
    truth = torch.softmax(x.cpu().double().masked_fill(~keep.cpu(), -torch.inf), dim)
    torch.testing.assert_close(masked.cpu(), truth.float(), equal_nan=True)


def test_rows_without_elements_are_nan(backend: Backend) -> None:
    x = backend.randn(4, 65)
    keep = torch.ones(4, 65, dtype=torch.bool, device=backend.device)
    keep[2] = False
    y = metalcore.softmax(x, mask=keep)
    assert y[2].isnan().all()
    assert y[[0, 1, 3]].isfinite().all()


def test_a_mask_of_another_dtype_is_added_in_the_wider_one(backend: Backend) -> None:
    x, mask = backend.randn(3, 65, dtype=torch.bfloat16), 100 + backend.randn(65)
    y = metalcore.softmax(x, mask=mask)
    assert y.dtype == torch.bfloat16
    truth = torch.softmax(x.cpu().double() + mask.cpu().double(), -1)
    assert error(y, truth) <= tolerance("softmax", torch.bfloat16, 65)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30])
def test_hard_values(backend: Backend, value: float) -> None:
    x = backend.randn(5, 70)
    x[1, 13], x[2, 69], x[3] = value, value, value
    y = torch.ops.metalcore.softmax(x, None, 1.0, False)
    truth = torch.softmax(x.cpu().double(), -1)
    torch.testing.assert_close(y.cpu(), truth.float(), equal_nan=True)


@given(st.data(), shapes(), dtypes)
def test_equals_torch_in_any_layout(
    data: st.DataObject, size: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = data.draw(layouts(torch.randn(size).to(dtype)))
    dim = data.draw(st.integers(-len(size), len(size) - 1))
    y = metalcore.softmax(x, dim, scale=2.0)
    truth = torch.softmax(x.double() * 2.0, dim)
    assert y.dtype == dtype
    assert error(y, truth) <= tolerance("softmax", dtype, size[dim])


def test_large_results_are_written_past_the_caches() -> None:
    for size, variant in (((4, 8), "rows"), (elementwise.LARGE, "rows_streamed")):
        with metalcore.trace() as t:
            metalcore.softmax(torch.randn(size))
        assert [r.variant for r in t.records] == [variant]


def test_derivatives_and_registration() -> None:
    x, mask = torch.randn(2, 3, 5), torch.randn(3, 5)
    check_registration("softmax", (x, None, 0.7, False))
    check_registration("softmax", (x, mask, 0.7, True))
    check_registration("softmax_backward", (x, torch.softmax(x + 1, -1), 0.7))


def test_compiles_without_graph_breaks() -> None:
    keep = torch.rand(40, 500) > 0.3
    elementwise.check_compiles(lambda x: metalcore.softmax(x, scale=0.5, mask=keep), 1)
    elementwise.check_compiles(lambda x: metalcore.softmax(x, 0), 1)


def test_function_transforms(backend: Backend) -> None:
    x, masks = backend.randn(3, 4, 16), backend.randn(3, 16)

    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return metalcore.softmax(x, mask=mask)

    truth = torch.softmax((x + masks[:, None]).cpu(), -1)
    torch.testing.assert_close(torch.func.vmap(masked)(x, masks).cpu(), truth)
    per_sample = torch.func.vmap(torch.func.grad(lambda a, m: masked(a, m).square().sum()))
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(masked(leaf, masks[:, None]).square().sum(), leaf)
    torch.testing.assert_close(per_sample(x, masks), grad)


def test_autocast_keeps_the_dtypes_of_torch() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            for size in ((4, 32), (300, 100)):
                x = torch.randn(size).to(dtype)
                assert metalcore.softmax(x).dtype == torch.softmax(x, -1).dtype
    assert metalcore.softmax(x, dtype=torch.float32).dtype == torch.float32


def test_module_is_a_drop_in_for_torch() -> None:
    ours, theirs = metalcore.MetalSoftmax(1), torch.nn.Softmax(1)
    x = torch.randn(30, 40, 50)
    torch.testing.assert_close(ours(x), theirs(x))
    assert str(ours) == str(theirs)
    assert isinstance(ours, torch.nn.Softmax)
    assert metalcore.MetalSoftmax is metalcore.nn.Softmax
    assert metalcore.fused_softmax is metalcore.softmax
    torch.testing.assert_close(metalcore.softmax(torch.tensor(3.0)), torch.tensor(1.0))


x8 = torch.randn(2, 8)
BAD = [
    (
        lambda: metalcore.softmax(x8.long()),
        TypeError,
        "softmax: x must be float32, float64, float16 or bfloat16, got int64; "
        "convert it with x.float()",
    ),
    (
        lambda: metalcore.softmax(x8, mask=torch.randn(7)),
        ValueError,
        "softmax: mask must broadcast to the shape of x; got x [2, 8] and mask [7]",
    ),
    (
        lambda: metalcore.softmax(x8.repeat(2000, 2), 2),
        ValueError,
        "softmax: dim must be a dimension of x, got 2 for x [4000, 16]",
    ),
    (
        lambda: metalcore.softmax(x8, 0, causal=True),
        ValueError,
        "softmax: dim must be the last one with causal=True, got 0",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


def test_meta_tensors_have_shapes_alone() -> None:
    x = torch.empty(3, 5, device="meta", dtype=torch.bfloat16)
    for y in (metalcore.softmax(x), metalcore.softmax(x, 0), metalcore.softmax(x, causal=True)):
        assert (y.device.type, y.shape, y.dtype) == ("meta", x.shape, x.dtype)
