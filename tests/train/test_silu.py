# SPDX-License-Identifier: MIT
"""SiLU on every backend, alone and with a bias, and its module."""

import pytest
import torch
import torch.nn.functional as F

import metalcore
from tests.backends import Backend
from tests.check import check_op, check_registration
from tests.train import elementwise
from tests.train.elementwise import each_case


@each_case
def test_matches_reference(backend: Backend, size: tuple[int, ...]) -> None:
    for dtype in backend.dtypes:
        dy, x = backend.randn(*size, dtype=dtype), backend.randn(*size, dtype=dtype)
        bias = backend.randn(size[-1], dtype=dtype)
        rows = x.numel() // max(1, size[-1])
        check_op(backend, "silu", (x,), reduces_over=1)
        check_op(backend, "bias_silu", (x, bias), reduces_over=1, gradient_reduces_over=rows)
        args = (dy, x)
        check_op(backend, "silu_backward", args, reduces_over=1, differentiable=False)
        args = (dy, x, bias)
        check_op(backend, "bias_silu_backward", args, reduces_over=1, differentiable=False)


def test_equals_torch_in_any_layout() -> None:
    elementwise.check_equals_torch("silu", metalcore.silu, F.silu, 1)


def test_the_trace_names_the_way() -> None:
    elementwise.check_path("silu", metalcore.silu, 1)


def test_hard_values(backend: Backend) -> None:
    elementwise.check_hard_values(backend, torch.ops.metalcore.silu, F.silu, 1)


def test_compiles_without_graph_breaks() -> None:
    elementwise.check_compiles(metalcore.silu, 1)


def test_function_transforms(backend: Backend) -> None:
    elementwise.check_transforms(backend, metalcore.silu, 1)


def test_autocast_keeps_the_dtypes_of_torch() -> None:
    elementwise.check_autocast(metalcore.silu, F.silu, 1)


def test_derivatives_and_registration() -> None:
    (dy, x), bias = torch.randn(2, 3, 5), torch.randn(5)
    check_registration("silu", (x,))
    check_registration("silu_backward", (dy, x))
    check_registration("bias_silu", (x, bias))
    check_registration("bias_silu_backward", (dy, x, bias))


def test_bias_of_another_dtype(backend: Backend) -> None:
    x, bias = backend.randn(300, 65, dtype=torch.bfloat16), backend.randn(65)
    y = metalcore.bias_silu(x, bias)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.cpu(), F.silu(x.cpu() + bias.cpu()))


def test_bias_function_transforms(backend: Backend) -> None:
    x, bias = backend.randn(3, 4, 16), backend.randn(3, 16)
    mapped = torch.func.vmap(metalcore.bias_silu)(x, bias)
    torch.testing.assert_close(mapped.cpu(), F.silu(x + bias[:, None]).cpu())


def test_module_is_a_drop_in_for_torch() -> None:
    x = torch.randn(4, 9000)
    ours, theirs = metalcore.MetalSiLU(), torch.nn.SiLU()
    assert isinstance(ours, torch.nn.SiLU)
    assert str(ours) == str(theirs)
    torch.testing.assert_close(ours(x), theirs(x))
    y = metalcore.MetalSiLU(inplace=True)(x)
    assert y is x
    assert metalcore.MetalSiLU is metalcore.nn.SiLU
    assert metalcore.metal_silu is metalcore.silu


x8 = torch.randn(2, 8)
BAD = [
    (
        lambda: metalcore.silu(x8.long()),
        TypeError,
        "silu: x must be float32, float64, float16 or bfloat16, got int64; "
        "convert it with x.float()",
    ),
    (
        lambda: metalcore.bias_silu(x8.repeat(2000, 1), torch.randn(7)),
        ValueError,
        "bias_silu: bias must match the last dimension of x; got x [4000, 8] and bias [7]",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
