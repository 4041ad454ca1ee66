# SPDX-License-Identifier: MIT
"""Causal convolution: values, states and every gradient."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend
from tests.check import check_op, check_registration
from tests.strategies import dtypes, layouts

OP = "causal_conv1d"
# [B, T, D], K, bias, state, SiLU
CASES = [
    ((2, 9, 40), 4, True, True, True),
    ((1, 1, 7), 2, False, True, False),
    ((2, 2, 33), 8, True, True, True),
    ((1, 300, 5), 3, True, False, True),
    ((2, 35, 65), 4, False, False, False),
    ((1, 3, 600), 5, False, True, True),
    ((0, 4, 8), 4, True, True, True),
    ((2, 0, 8), 4, True, True, True),
    ((2, 4, 0), 4, True, True, True),
]


def _args(case: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    (B, T, D), K, has_bias, has_state, silu = case
    x, weight = torch.randn(B, T, D).to(dtype), torch.randn(D, K).to(dtype)
    bias = torch.randn(D).to(dtype) if has_bias else None
    state = torch.randn(B, K - 1, D).to(dtype) if has_state else None
    return x, weight, bias, state, silu


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(backend: Backend, case: Any) -> None:
    B, T, _ = case[0]
    at = CASES.index(case) % len(backend.dtypes)
    for dtype in backend.dtypes if backend.name == "cpu" else backend.dtypes[at : at + 1]:
        args = _args(case, dtype)
        check_op(backend, OP, args, reduces_over=case[1], gradient_reduces_over=B * T + case[1])


@given(st.data(), st.integers(1, 40), st.integers(12, 70), st.integers(2, 8), dtypes)
def test_any_size_in_any_layout(
    data: st.DataObject, T: int, D: int, K: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, weight, bias, state, _ = _args(((2, T, D), K, True, True, True), dtype)
    x, weight, state = (data.draw(layouts(t)) for t in (x, weight, state))
    args = (x, weight, bias, state, data.draw(st.booleans()))
    check_op(Backend("cpu"), OP, args, reduces_over=K, gradient_reduces_over=2 * T + K)


def test_weights_of_another_dtype(backend: Backend) -> None:
    x, weight, bias, state, _ = _args(CASES[0], torch.float32)
    half = torch.bfloat16
    args = (x.to(half), weight, bias.to(half), state.to(half), True)
    check_op(backend, OP, args, reduces_over=4, gradient_reduces_over=18)


def test_equals_torch() -> None:
    conv = torch.nn.Conv1d(40, 40, 4, groups=40, padding=3)
    x = torch.randn(2, 9, 40)
    truth = F.silu(conv.double()(x.double().mT)[..., :9].mT)
    weight, bias = conv.weight.float(), conv.bias.float()
    y = metalcore.causal_conv1d(x, weight, bias, activation="silu")
    assert error(y, truth) <= tolerance(OP, torch.float32, 4)


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 5, 9])
def test_a_sequence_may_be_cut_anywhere(cut: int) -> None:
    x, weight, bias, state, _ = _args(CASES[0], torch.float32)
    how: dict[str, Any] = {"activation": "silu", "return_last_state": True}
    whole, last = metalcore.causal_conv1d(x, weight, bias, initial_state=state, **how)
    first, between = metalcore.causal_conv1d(x[:, :cut], weight, bias, initial_state=state, **how)
    rest, end = metalcore.causal_conv1d(x[:, cut:], weight, bias, initial_state=between, **how)
    assert torch.equal(torch.cat([first, rest], 1), whole)
    assert torch.equal(end, last)


def test_steps_are_the_sequence() -> None:
    x, weight, bias, state, _ = _args(CASES[0], torch.float32)
    whole = metalcore.causal_conv1d(x, weight, bias, initial_state=state, activation="silu")
    for t in range(x.shape[1]):
        y, state = metalcore.causal_conv1d_step(x[:, t], state, weight, bias, activation="silu")
        assert torch.equal(y, whole[:, t])


def test_bits_do_not_depend_on_threads() -> None:
    x, weight = torch.randn(3, 300, 600, requires_grad=True), torch.randn(600, 4)
    weight.requires_grad_()
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            y = metalcore.causal_conv1d(x, weight, activation="silu")
            found.append([y, *torch.autograd.grad(y.square().sum(), (x, weight))])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_derivatives_and_registration() -> None:
    check_registration(OP, _args(((1, 3, 2), 3, True, True, True), torch.float64))


def test_arguments_that_do_not_go_together() -> None:
    x, weight = torch.randn(2, 5, 6), torch.randn(6, 4)
    for wrong in (torch.randn(5, 4), torch.randn(6, 9), torch.randn(6, 1), torch.randn(6)):
        with pytest.raises(ValueError, match="causal_conv1d: weight must be"):
            metalcore.causal_conv1d(x, wrong)
    with pytest.raises(ValueError, match=r"state must have the shape \[2, 3, 6\]"):
        metalcore.causal_conv1d(x, weight, initial_state=torch.randn(2, 4, 6))
    with pytest.raises(ValueError, match="activation must be"):
        metalcore.causal_conv1d(x, weight, activation="gelu")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="causal_conv1d_step: x must be"):
        metalcore.causal_conv1d_step(x, torch.randn(2, 3, 6), weight)
