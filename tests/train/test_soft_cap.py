# SPDX-License-Identifier: MIT
"""The soft cap on every backend, and what is peculiar to it."""

import pytest
import torch
from torch import Tensor

import metalcore
from tests.backends import Backend
from tests.check import check_op, check_registration
from tests.train import elementwise
from tests.train.elementwise import each_case


def _ours(x: Tensor) -> Tensor:
    return metalcore.soft_cap(x, 1.5)


def _torch(x: Tensor) -> Tensor:
    return 1.5 * torch.tanh(x / 1.5)


@each_case
def test_matches_reference(backend: Backend, size: tuple[int, ...]) -> None:
    for dtype in backend.dtypes:
        dy, x = backend.randn(*size, dtype=dtype), backend.randn(*size, dtype=dtype)
        check_op(backend, "soft_cap", (x, 0.8), reduces_over=1)
        check_op(backend, "soft_cap_backward", (dy, x, 0.8), reduces_over=1, differentiable=False)


def test_equals_torch_in_any_layout() -> None:
    elementwise.check_equals_torch("soft_cap", _ours, _torch, 1)


def test_the_trace_names_the_way() -> None:
    elementwise.check_path("soft_cap", _ours, 1)


def test_hard_values(backend: Backend) -> None:
    elementwise.check_hard_values(backend, _ours, _torch, 1, (1.5, -1.5))


def test_compiles_without_graph_breaks() -> None:
    elementwise.check_compiles(_ours, 1)


def test_function_transforms(backend: Backend) -> None:
    elementwise.check_transforms(backend, _ours, 1)


def test_autocast_keeps_the_dtypes_of_torch() -> None:
    elementwise.check_autocast(_ours, _torch, 1)


def test_derivatives_and_registration() -> None:
    dy, x = torch.randn(2, 3, 5)
    check_registration("soft_cap", (x, 0.8))
    check_registration("soft_cap_backward", (dy, x, 0.8))


def test_small_values_pass_unchanged() -> None:
    x = torch.logspace(-40, -6, 20000)
    torch.testing.assert_close(metalcore.soft_cap(x, 30.0), x)


x8 = torch.randn(2, 8)
BAD = [
    (
        lambda: metalcore.soft_cap(x8.long(), 1.0),
        TypeError,
        "soft_cap: x must be float32, float64, float16 or bfloat16, got int64; "
        "convert it with x.float()",
    ),
    (
        lambda: metalcore.soft_cap(x8, 0.0),
        ValueError,
        "soft_cap: cap must be greater than 0, got 0.0",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
