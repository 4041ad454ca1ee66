# SPDX-License-Identifier: MIT
"""GELU on every backend, alone and with a bias, and its module."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore
from tests.backends import Backend
from tests.check import check_op, check_registration
from tests.train import elementwise
from tests.train.elementwise import each_case

PAIRS = [
    (partial(metalcore.gelu, approximate=kind), partial(F.gelu, approximate=kind))
    for kind in ("none", "tanh")
]


@each_case
def test_matches_reference(backend: Backend, size: tuple[int, ...]) -> None:
    for dtype in backend.dtypes:
        for tanh in (False, True):
            dy, x = backend.randn(*size, dtype=dtype), backend.randn(*size, dtype=dtype)
            bias = backend.randn(size[-1], dtype=dtype)
            rows = x.numel() // max(1, size[-1])
            check_op(backend, "gelu", (x, tanh), reduces_over=1)
            check_op(
                backend, "bias_gelu", (x, bias, tanh), reduces_over=1, gradient_reduces_over=rows
            )
            args = (dy, x, tanh)
            check_op(backend, "gelu_backward", args, reduces_over=1, differentiable=False)
            args = (dy, x, bias, tanh)
            check_op(backend, "bias_gelu_backward", args, reduces_over=1, differentiable=False)


def test_equals_torch_in_any_layout() -> None:
    for ours, theirs in PAIRS:
        elementwise.check_equals_torch("gelu", ours, theirs, 1)


def test_the_trace_names_the_way() -> None:
    for kind in ("none", "tanh"):
        elementwise.check_path("gelu", partial(metalcore.gelu, approximate=kind), 1)


def test_hard_values(backend: Backend) -> None:
    def op(x: Tensor, tanh: bool) -> Tensor:
        return torch.ops.metalcore.gelu(x, tanh)  # type: ignore[no-any-return]

    for tanh, (_, theirs) in zip((False, True), PAIRS, strict=True):
        elementwise.check_hard_values(backend, partial(op, tanh=tanh), theirs, 1)


def test_compiles_without_graph_breaks() -> None:
    elementwise.check_compiles(partial(metalcore.gelu, approximate="tanh"), 1)


def test_function_transforms(backend: Backend) -> None:
    elementwise.check_transforms(backend, metalcore.gelu, 1)


def test_autocast_keeps_the_dtypes_of_torch() -> None:
    elementwise.check_autocast(metalcore.gelu, F.gelu, 1)


def test_derivatives_and_registration() -> None:
    (dy, x), bias = torch.randn(2, 3, 5), torch.randn(5)
    for tanh in (False, True):
        check_registration("gelu", (x, tanh))
        check_registration("gelu_backward", (dy, x, tanh))
        check_registration("bias_gelu", (x, bias, tanh))
        check_registration("bias_gelu_backward", (dy, x, bias, tanh))


def test_bias_of_another_dtype(backend: Backend) -> None:
    x, bias = backend.randn(300, 65, dtype=torch.bfloat16), backend.randn(65)
    y = metalcore.bias_gelu(x, bias)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.cpu(), F.gelu(x.cpu() + bias.cpu()))


def test_bias_function_transforms(backend: Backend) -> None:
    x, bias = backend.randn(3, 4, 16), backend.randn(3, 16)
    mapped = torch.func.vmap(metalcore.bias_gelu)(x, bias)
    torch.testing.assert_close(mapped.cpu(), F.gelu(x + bias[:, None]).cpu())


def test_module_is_a_drop_in_for_torch() -> None:
    x = torch.randn(4, 9000)
    for kind in ("none", "tanh"):
        ours, theirs = metalcore.MetalGELU(kind), torch.nn.GELU(kind)
        assert isinstance(ours, torch.nn.GELU)
        assert str(ours) == str(theirs)
        torch.testing.assert_close(ours(x), theirs(x))
    assert metalcore.MetalGELU is metalcore.nn.GELU
    assert metalcore.metal_gelu is metalcore.gelu


x8 = torch.randn(2, 8)
BAD = [
    (
        lambda: metalcore.gelu(x8.long()),
        TypeError,
        "gelu: x must be float32, float64, float16 or bfloat16, got int64; "
        "convert it with x.float()",
    ),
    (
        lambda: metalcore.bias_gelu(x8.repeat(2000, 1), torch.randn(7)),
        ValueError,
        "bias_gelu: bias must match the last dimension of x; got x [4000, 8] and bias [7]",
    ),
    (
        lambda: metalcore.gelu(x8, "fast"),
        ValueError,
        "gelu: approximate must be one of none, tanh, got 'fast'",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
