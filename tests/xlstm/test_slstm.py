# SPDX-License-Identifier: MIT
"""sLSTM: values, states and every gradient."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import metalcore
from tests.backends import Backend
from tests.check import check_op, check_registration
from tests.strategies import dtypes, layouts

OP = "slstm"
# [B, T, H, D], bias, states
CASES = [
    ((2, 9, 3, 5), True, True),
    ((1, 1, 1, 1), False, True),
    ((9, 4, 2, 40), True, False),
    ((3, 6, 1, 33), False, False),
    ((1, 5, 5, 64), True, True),
    ((0, 4, 2, 8), True, True),
    ((2, 0, 2, 8), True, True),
    ((2, 4, 0, 8), True, True),
]


def _args(case: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    (B, T, H, D), has_bias, has_states = case
    x, R = torch.randn(B, T, 4, H, D).to(dtype), (torch.randn(H, D, 4, D) / D**0.5 / 2).to(dtype)
    bias = torch.randn(H, 4, D).to(dtype) if has_bias else None
    states = None
    if has_states:
        states = torch.randn(B, 4, H, D)
        states[:, 2] = states[:, 2].abs() + 0.5
        states = states.to(torch.float64 if dtype == torch.float64 else torch.float32)
    return x, R, bias, states, None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(backend: Backend, case: Any) -> None:
    B, T, _, D = case[0]
    at = CASES.index(case) % len(backend.dtypes)
    for dtype in backend.dtypes if backend.name == "cpu" else backend.dtypes[at : at + 1]:
        args = _args(case, dtype)
        check_op(backend, OP, args, reduces_over=T * D + B, differentiable=T > 0)


@given(st.data(), st.integers(1, 12), st.integers(1, 3), st.integers(1, 40), dtypes)
def test_any_size_in_any_layout(
    data: st.DataObject, T: int, H: int, D: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, R, bias, states, _ = _args(((2, T, H, D), True, True), dtype)
    x, R, states = (data.draw(layouts(t)) for t in (x, R, states))
    check_op(Backend("cpu"), OP, (x, R, bias, states, None), reduces_over=T * D)


def _loop(
    x: Tensor, R: Tensor, bias: Tensor, states: Any = None, clip: float | None = None
) -> tuple[Tensor, Any]:
    """The definition, one step after the other, without a scale of the states."""
    B, T, _, H, D = x.shape
    y, c, n = states or (x.new_zeros(B, H, D) for _ in range(3))
    found = []
    for t in range(T):
        if clip is not None and y.requires_grad:
            y = y.clone()
            y.register_hook(lambda g: g.clamp(-clip, clip))
        raw = x[:, t] + torch.einsum("bhd,hdge->bghe", y, R) + bias.transpose(0, 1)
        i, f, z, o = raw.unbind(1)
        c, n = f.sigmoid() * c + i.exp() * z.tanh(), f.sigmoid() * n + i.exp()
        y = o.sigmoid() * c / n
        found.append(y)
    return torch.stack(found, 1), (y, c, n)


@pytest.mark.parametrize("clip", [None, 0.05, 0.0])
def test_the_definition(clip: float | None) -> None:
    x, R, bias, _, _ = _args(((3, 30, 2, 9), True, False), torch.float64)
    leaves = [a.requires_grad_() for a in (x, R, bias)]
    truth, (_, c, n) = _loop(*leaves, clip=clip)
    y, last = metalcore.slstm(*leaves, return_last_states=True, gradient_clip=clip)
    close = torch.testing.assert_close
    close(y, truth)
    close(last[0], truth[:, -1])
    close(last[1] * last[3].exp(), c)
    close(last[2] * last[3].exp(), n)
    seed = torch.randn_like(y)
    for a, b in zip(*(torch.autograd.grad(h, leaves, seed) for h in (y, truth)), strict=True):
        close(a, b)


def test_both_layouts_of_weights() -> None:
    x, R, bias, _, _ = _args(((2, 5, 3, 8), True, False), torch.float32)
    y = metalcore.slstm(x, R, bias)
    by_gates = R.permute(0, 2, 3, 1).reshape(3, 32, 8)
    flat = bias.transpose(0, 1).reshape(-1)
    assert torch.equal(metalcore.slstm(x.flatten(2), by_gates, flat), y)


@pytest.mark.parametrize("cut", [0, 1, 4, 9])
def test_a_sequence_may_be_cut_anywhere(cut: int) -> None:
    x, R, bias, _, _ = _args(((2, 9, 3, 6), True, False), torch.float64)
    leaves = [a.requires_grad_() for a in (x, R, bias)]
    how: Any = {"return_last_states": True}
    whole, last = metalcore.slstm(x, R, bias, **how)
    first, between = metalcore.slstm(x[:, :cut], R, bias, **how)
    rest, end = metalcore.slstm(x[:, cut:], R, bias, states=between, **how)
    parts = torch.cat([first, rest], 1)
    close = torch.testing.assert_close
    close(parts, whole)
    weights = [torch.randn_like(a) for a in (whole, *last)]
    for a, b in zip(end, last, strict=True):
        close(a, b)
    of_whole = torch.autograd.grad((whole, *last), leaves, weights)
    of_parts = torch.autograd.grad((parts, *end), leaves, weights)
    for a, b in zip(of_parts, of_whole, strict=True):
        close(a, b)


def test_steps_are_the_sequence() -> None:
    x, R, bias, _, _ = _args(((2, 9, 3, 20), True, False), torch.float32)
    whole = metalcore.slstm(x, R, bias)
    states = None
    for t in range(9):
        y, states = metalcore.slstm_step(x[:, t], R, bias, states)
        assert torch.equal(y, whole[:, t])


@pytest.mark.parametrize("gates", [(15, 3), (100, 3), (-100, 3), (-40, -30), (2, -100)])
def test_extreme_gates(gates: tuple[float, float]) -> None:
    x, R, bias, _, _ = _args(((2, 40, 2, 8), True, False), torch.float32)
    x[:, :, 0] += gates[0]
    x[:, :, 1] += gates[1]

    def results(*args: Tensor) -> tuple[Tensor, ...]:
        leaves = [a.detach().clone().requires_grad_() for a in args]
        y, last = metalcore.slstm(*leaves, return_last_states=True)
        return y, *last, *torch.autograd.grad(y.sum(), leaves)

    found, exact = results(x, R, bias), results(*(a.double() for a in (x, R, bias)))
    for a, b in zip(found, exact, strict=True):
        assert a.isfinite().all()
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-30


def test_bits_do_not_depend_on_threads() -> None:
    x, R, bias, _, _ = _args(((12, 20, 3, 40), True, False), torch.float32)
    leaves = [a.requires_grad_() for a in (x, R, bias)]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            y = metalcore.slstm(*leaves)
            found.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_weights_of_another_dtype(backend: Backend) -> None:
    x, R, bias, states, _ = _args(((2, 3, 2, 6), True, True), torch.float32)
    args = (x.bfloat16(), R, bias.bfloat16(), states, 0.1)
    check_op(backend, OP, args, reduces_over=20, differentiable=False)


def test_derivatives_and_registration() -> None:
    check_registration(OP, _args(((1, 3, 1, 2), True, True), torch.float64))


def test_wrong_arguments() -> None:
    x, R = torch.randn(2, 5, 4, 3, 6), torch.randn(3, 6, 4, 6)
    with pytest.raises(ValueError, match=r"slstm: x must be \[B, T, 4, 3, 6\]"):
        metalcore.slstm(x[..., :5], R)
    with pytest.raises(ValueError, match="slstm: recurrent must be"):
        metalcore.slstm(x, R[..., :5])
    with pytest.raises(ValueError, match=r"bias must have the shape \[3, 4, 6\]"):
        metalcore.slstm(x, R, torch.randn(6))
    with pytest.raises(ValueError, match="gradient_clip must not be negative"):
        metalcore.slstm(x, R, gradient_clip=-1.0)
    with pytest.raises(ValueError, match="states must be y, c, n and m"):
        metalcore.slstm(x, R, states=(torch.zeros(2, 3, 6),))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="weights must be no wider than x"):
        metalcore.slstm(x, R.double())
    with pytest.raises(ValueError, match=r"slstm_step: x must be \[B, 4, H, D\]"):
        metalcore.slstm_step(x, R)
