# SPDX-License-Identifier: MIT
import copy
import pickle

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

CASES = [
    # x shape, why
    ((4, 64), "one simdgroup per row"),
    ((3, 31), "row shorter than a simdgroup"),
    ((9, 129), "row ends inside a register"),
    ((2, 5, 1025), "three dimensions, odd row longer than a threadgroup"),
    ((1, 4096), "one row of a large model"),
    ((70, 36), "more rows than one block of the backward pass takes"),
    ((6001, 8), "runs of rows per simdgroup, the last one short"),
    ((7,), "one dimension"),
    ((2, 3, 4, 8), "four dimensions"),
    ((1, 1), "one value"),
    ((0, 64), "no rows"),
    ((0, 0), "no rows of no values"),
    ((3, 0), "no columns"),
]


@pytest.mark.parametrize("size", [c[0] for c in CASES], ids=[c[1] for c in CASES])
@pytest.mark.parametrize("with_weight", [True, False], ids=["weight", "no weight"])
def test_matches_reference(backend: Backend, size: tuple[int, ...], with_weight: bool) -> None:
    for dtype in backend.dtypes:
        x = backend.randn(*size, dtype=dtype)
        weight = backend.randn(size[-1], dtype=dtype) if with_weight else None
        rows = x.numel() // max(1, size[-1])
        # the norm of one value is its sign: only eps gives it a slope to compare
        eps = 1.0 if size[-1] == 1 else 1e-6
        check_op(
            backend,
            "rms_norm",
            (x, weight, eps, 0.0),
            reduces_over=size[-1],
            gradient_reduces_over=max(size[-1], rows),
        )


def test_outputs_past_the_caches_are_written_whole() -> None:
    # 16 MiB and more take the streaming stores
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(4200, 2048).to(dtype)
        with metalcore.trace() as t:
            y = metalcore.rms_norm(x, None, 1e-6)
        truth = F.rms_norm(x.double(), (2048,), None, 1e-6)
        assert error(y, truth) <= tolerance("rms_norm", dtype, 2048)
        assert t.records[0].variant == "rows_streamed"


# Row lengths at which plans change their kernel: by what a thread can keep, and by alignment.
VARIANTS = (31, 65, 1025, 4099, 64, 260, 1000, 16400, 33000)


@pytest.mark.parametrize("n", VARIANTS)
def test_every_variant(backend: Backend, n: int) -> None:
    for dtype in backend.dtypes:
        x, dy = backend.randn(2, n, dtype=dtype), backend.randn(2, n, dtype=dtype)
        for weight_dtype in {dtype, torch.float32}:
            weight = backend.randn(n, dtype=weight_dtype)
            args = (x, weight, 1e-6, 0.0)
            check_op(backend, "rms_norm", args, reduces_over=n, differentiable=False)
            rstd = torch.rand(2, device=x.device) + 0.5
            rstd = rstd.double() if dtype == torch.float64 else rstd
            check_op(
                backend,
                "rms_norm_backward",
                (dy, x, weight, rstd, 1.0, x, True),
                reduces_over=n,
                differentiable=False,
            )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_weight_with_half_input(backend: Backend, dtype: torch.dtype) -> None:
    x, weight = backend.randn(5, 200, dtype=dtype), backend.randn(200)
    check_op(backend, "rms_norm", (x, weight, 1e-6, 0.0), reduces_over=200)
    assert metalcore.rms_norm(x, weight).dtype == dtype


def test_weights_of_other_dtypes_than_the_input(backend: Backend) -> None:
    x = backend.randn(5, 65)
    for dtype in backend.dtypes:
        weight = backend.randn(65, dtype=dtype)
        y = metalcore.rms_norm(x, weight, 1e-6)
        truth = F.rms_norm(x.cpu().double(), (65,), weight.cpu().double(), 1e-6)
        assert y.dtype == torch.float32
        assert error(y, truth) <= tolerance("rms_norm", torch.float32, 65)


def test_gemma_adds_one_to_the_weight(backend: Backend) -> None:
    x, weight = backend.randn(3, 64), backend.randn(64)
    check_op(backend, "rms_norm", (x, weight, 1e-6, 1.0), reduces_over=64)
    torch.testing.assert_close(
        metalcore.rms_norm(x, weight, 1e-6, weight_offset=1.0),
        metalcore.rms_norm(x, weight + 1.0, 1e-6),
    )


@given(st.data(), shapes(), dtypes)
def test_equals_torch_in_any_layout(
    data: st.DataObject, size: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = data.draw(layouts(torch.randn(size).to(dtype)))
    weight = torch.randn(size[-1:]).to(dtype)
    y = metalcore.rms_norm(x, weight, 1e-5)
    truth = F.rms_norm(x.double(), size[-1:], weight.double(), 1e-5)
    assert y.dtype == dtype
    assert error(y, truth) <= tolerance("rms_norm", dtype, size[-1])


def test_several_normalized_dimensions(backend: Backend) -> None:
    x, weight = backend.randn(2, 3, 4, 5), backend.randn(4, 5)
    y = metalcore.rms_norm(x, weight, 1e-6)
    truth = F.rms_norm(x.cpu().double(), (4, 5), weight.cpu().double(), 1e-6)
    assert error(y, truth) <= tolerance("rms_norm", torch.float32, 20)
    alone = metalcore.rms_norm(x, normalized_shape=(4, 5))
    assert error(alone, F.rms_norm(x.cpu().double(), (4, 5))) <= tolerance(
        "rms_norm", torch.float32, 20
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_default_eps_is_that_of_torch(dtype: torch.dtype) -> None:
    # so small that the result depends on eps
    x = torch.full((1, 8), 1e-3, dtype=dtype)
    torch.testing.assert_close(metalcore.rms_norm(x), F.rms_norm(x, (8,)))


def test_a_row_of_zeros_stays_finite(backend: Backend) -> None:
    x = torch.zeros(2, 8, device=backend.device, requires_grad=True)
    y = metalcore.rms_norm(x, None, 1e-6)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e-30])
def test_hard_values(backend: Backend, value: float) -> None:
    x = backend.randn(3, 70)
    x[1, 13] = value
    y = metalcore.rms_norm(x, None, 1e-6).cpu()
    truth = F.rms_norm(x.cpu().double(), (70,), None, 1e-6)
    torch.testing.assert_close(y, truth.float(), equal_nan=True)


def test_a_row_whose_squares_overflow_is_zero(backend: Backend) -> None:
    x = backend.randn(3, 70)
    x[1, 13] = 1e30
    y = metalcore.rms_norm(x, None, 1e-6)
    assert not y[1].any()
    assert (y[[0, 2]] != 0).all()


def test_a_nan_stays_a_nan_in_bfloat16(backend: Backend) -> None:
    # all ones: rounding up must not carry into the sign
    weight = torch.full((33,), -1, dtype=torch.int32).view(torch.float32).to(backend.device)
    x = backend.randn(2, 33, dtype=torch.bfloat16)
    assert metalcore.rms_norm(x, weight).isnan().all()


def test_derivatives_and_registration() -> None:
    x, weight = torch.randn(3, 5), torch.randn(5)
    rstd = torch.rand(3) + 0.5
    check_registration("rms_norm", (x, weight, 1e-3, 0.0))
    check_registration("rms_norm", (x, None, 1e-3, 0.0))
    check_registration("rms_norm_backward", (x, x + 1, weight, rstd, 1.0, None, True))
    check_registration("rms_norm_backward", (x, x + 1, weight, rstd, 1.0, x * 2, True))


def test_compiles_without_graph_breaks(device: Backend) -> None:
    norm = metalcore.MetalRMSNorm(33, eps=1e-5).to(device.device)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    x = device.randn(4, 33).requires_grad_()
    torch.testing.assert_close(compiled(x), norm(x), rtol=0, atol=0)
    (dx,) = torch.autograd.grad(compiled(x).square().sum(), x)
    (expected,) = torch.autograd.grad(norm(x).square().sum(), x)
    torch.testing.assert_close(dx, expected, rtol=0, atol=0)


def test_function_transforms(backend: Backend) -> None:
    x, weights = backend.randn(3, 4, 16), backend.randn(3, 16)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return metalcore.rms_norm(x, weight, 1e-5)

    mapped = torch.func.vmap(norm)(x, weights)
    each = torch.stack([norm(a, w) for a, w in zip(x, weights, strict=True)])
    torch.testing.assert_close(mapped, each)
    assert torch.func.vmap(norm)(x[:0], weights[:0]).shape == (0, 4, 16)
    per_sample = torch.func.vmap(torch.func.grad(lambda a, w: norm(a, w).square().sum()))
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(
        sum(norm(a, w).square().sum() for a, w in zip(leaf, weights, strict=True)), leaf
    )
    torch.testing.assert_close(per_sample(x, weights), grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_autocast_keeps_the_dtypes_of_torch(dtype: torch.dtype) -> None:
    x, ours = torch.randn(4, 32).to(dtype), metalcore.MetalRMSNorm(32, eps=1e-5)
    theirs = torch.nn.RMSNorm(32, eps=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = ours(x), theirs(x)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected)


def test_gradient_of_weight_does_not_depend_on_threads() -> None:
    before = torch.get_num_threads()
    for dtype in (torch.float32, torch.bfloat16):
        x, dy = torch.randn(1000, 257).to(dtype), torch.randn(1000, 257).to(dtype)
        weight = torch.randn(257).to(dtype)
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
            metalcore.rms_norm(a, w, 1e-6).backward(dy)
            found.append((a.grad, w.grad))
        torch.set_num_threads(before)
        for dx, dweight in found[1:]:
            assert torch.equal(dx, found[0][0])
            assert torch.equal(dweight, found[0][1])


def test_frozen_weight_gets_no_gradient() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8)
    metalcore.rms_norm(x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_module_is_a_drop_in_for_torch() -> None:
    theirs = torch.nn.RMSNorm((3, 8), eps=1e-5)
    torch.nn.init.normal_(theirs.weight)
    ours = metalcore.MetalRMSNorm((3, 8), eps=1e-5)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(ours(x), theirs(x))
    assert isinstance(ours, torch.nn.RMSNorm)
    assert str(ours) == str(theirs)
    assert metalcore.MetalRMSNorm(8, elementwise_affine=False).weight is None
    assert metalcore.MetalRMSNorm is metalcore.nn.RMSNorm


def test_module_survives_deepcopy_and_pickle() -> None:
    norm = metalcore.MetalRMSNorm(8, eps=1e-5, weight_offset=1.0)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 8)
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        torch.testing.assert_close(twin(x), norm(x), rtol=0, atol=0)
        assert twin.weight_offset == 1.0


def test_a_new_gemma_module_scales_by_one() -> None:
    norm = metalcore.MetalRMSNorm(8, weight_offset=1.0)
    assert torch.equal(norm.weight, torch.zeros(8))


def test_seed_spelling_of_the_function() -> None:
    x, weight = torch.randn(2, 8, requires_grad=True), torch.randn(8)
    y = metalcore.RMSNormFunction.apply(x, weight, 1e-6)
    torch.testing.assert_close(y, metalcore.rms_norm(x, weight, 1e-6))
    y.sum().backward()


x8, w8 = torch.randn(2, 8), torch.randn(8)
BAD = [
    (
        lambda: metalcore.rms_norm(x8, torch.randn(7)),
        ValueError,
        "rms_norm: weight must match the last dimension of x; got x [2, 8] and weight [7]",
    ),
    (
        lambda: metalcore.rms_norm(x8, torch.randn(3, 8)),
        ValueError,
        "rms_norm: weight must match the last 2 dimensions of x; got x [2, 8] and weight [3, 8]",
    ),
    (
        lambda: metalcore.rms_norm(x8.long()),
        TypeError,
        "rms_norm: x must be float32, float64, float16 or bfloat16, got int64; "
        "convert it with x.float()",
    ),
    (
        lambda: metalcore.rms_norm(x8, w8.to(torch.complex64)),
        TypeError,
        "rms_norm: weight must be float32, float64, float16 or bfloat16, got complex64; "
        "convert it with weight.float()",
    ),
    (
        lambda: metalcore.rms_norm(x8, w8.to("meta")),
        ValueError,
        "rms_norm: tensors must be on one device, got x on cpu and weight on meta; "
        "move them with .to()",
    ),
    (
        lambda: metalcore.rms_norm(x8, w8, eps=0.0),
        ValueError,
        "rms_norm: eps must be greater than 0, got 0.0",
    ),
    (
        lambda: metalcore.rms_norm(x8, w8, eps=-1e-6),
        ValueError,
        "rms_norm: eps must be greater than 0, got -1e-06",
    ),
    (
        lambda: metalcore.rms_norm(torch.tensor(1.0)),
        ValueError,
        "rms_norm: x must have at least one dimension, got []",
    ),
    (
        lambda: metalcore.rms_norm(x8, w8, normalized_shape=(2, 8)),
        ValueError,
        "rms_norm: weight must have the shape [2, 8], got [8]",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
