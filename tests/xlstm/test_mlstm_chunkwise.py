# SPDX-License-Identifier: MIT
"""mLSTM over sequences: values, states and every gradient."""

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
from tests.xlstm.mlstm import distance, inputs, recurrent, states

OP = "mlstm_chunkwise"
EXACT = (1e-6, False, True, False)
RULES = {
    "exact": EXACT,
    "nx": (1e-6, False, True, True),
    "sigmoid": (1e-6, True, True, False),
    "sums": (1e-6, True, False, False),
    "large eps": (0.3, False, True, False),
}
# B, H, T, D, E, chunk
SIZES = [
    (2, 3, 37, 8, 5, 16),
    (1, 1, 1, 1, 1, 64),
    (1, 2, 65, 33, 70, 64),
    (2, 1, 7, 40, 3, 32),
    (2, 2, 7, 4, 0, 4),
]


def _args(sizes: Any, rule: Any, dtype: torch.dtype, has_states: bool = True) -> tuple[Any, ...]:
    *shape, chunk = sizes
    B, H, _, D, E = shape
    before = states(B, H, D, E, dtype) if has_states else (None,) * 3
    return *inputs(*shape, dtype), *before, None, *rule, chunk


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_matches_reference(sizes: Any, rule: str) -> None:
    backend = Backend("cpu")
    for dtype in backend.dtypes:
        args = _args(sizes, RULES[rule], dtype)
        check_op(backend, OP, args, reduces_over=sizes[2] + sizes[3] + sizes[4])


@pytest.mark.parametrize("rule", list(RULES))
def test_simulated(rule: str) -> None:
    # a simulated kernel takes seconds: one size and dtype for each rule
    at = list(RULES).index(rule)
    dtype = (torch.float32, torch.float16, torch.bfloat16)[at % 3]
    sizes = [(1, 2, 37, 8, 5, 64), (1, 1, 70, 9, 33, 64)][at % 2]
    with Backend("sim") as backend:
        args = _args(sizes, RULES[rule], dtype, has_states=at % 2 == 0)
        check_op(backend, OP, args, reduces_over=sizes[2] + sizes[3] + sizes[4])


@pytest.mark.parametrize("rule", list(RULES))
def test_packed_sequences_simulated(rule: str) -> None:
    """Empty ones, one step, and chunks that end within a sequence or with it."""
    at = list(RULES).index(rule)
    lengths = [(0, 3, 0, 33, 1), (32, 5, 0), (1, 70, 2), (40,), (0, 64, 0, 1)][at]
    starts = torch.tensor([0, *lengths]).cumsum(0).to((torch.int64, torch.int32)[at % 2])
    T, N, dtype = int(starts[-1]), len(lengths), (torch.float32, torch.bfloat16)[at % 2]
    before = (None,) * 3 if at == 2 else states(N, 2, 9, 5, dtype)
    args = (*inputs(1, 2, T, 9, 5, dtype), *before, starts, *RULES[rule], 64)
    with Backend("sim") as backend:
        check_op(backend, OP, args, reduces_over=T + 14)


def test_packed_sequences_without_steps_simulated() -> None:
    before = states(2, 1, 4, 3)
    rows = (torch.zeros(0, 1, 4), torch.zeros(0, 1, 4), torch.zeros(0, 1, 3))
    names = ("c_initial", "n_initial", "m_initial")
    with Backend("sim"), metalcore.trace() as t:
        h, last = metalcore.mlstm_chunkwise(
            *rows, torch.zeros(0, 1), torch.zeros(0, 1), cu_seqlens=torch.tensor([0, 0, 0]),
            return_last_states=True, **dict(zip(names, before, strict=True)),
        )  # fmt: skip
    assert {r.path.split(":")[0] for r in t.records} == {"sim"}
    assert h.shape == (0, 1, 3)
    for x, y in zip(last, (*before[:2], before[2][..., None]), strict=True):
        assert torch.equal(x, y)


@given(st.data(), st.integers(1, 70), st.integers(1, 40), st.integers(1, 40), dtypes)
def test_any_size_in_any_layout(
    data: st.DataObject, T: int, D: int, E: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    has_states = data.draw(st.booleans())
    q, k, v, *rest = _args((2, 2, T, D, E, 16), EXACT, dtype, has_states)
    q, k, v = (data.draw(layouts(x)) for x in (q, k, v))
    check_op(Backend("cpu"), OP, (q, k, v, *rest), reduces_over=T + D + E, differentiable=False)


@pytest.mark.parametrize("T", [1, 7, 63, 64, 65, 1000])
def test_three_forms_are_one(T: int) -> None:
    args = inputs(1, 2, T, 24, 40)
    truth, (c, n, m) = recurrent(*(x.double() for x in args))
    h, last = metalcore.mlstm_chunkwise(*args, return_last_states=True)
    for x, y in zip((h, *last), (truth, c, n, m[..., None]), strict=True):
        assert distance(x, y) <= 2e-6
    assert torch.equal(metalcore.mlstm_parallel(*args), h)
    steps: Any = ()
    found = []
    for t in range(T):
        y, steps = metalcore.mlstm_step(*(x[:, :, t] for x in args), *steps)
        found.append(y)
    assert distance(torch.stack(found, 2), truth) <= 2e-6
    for x, y in zip(steps, (c, n, m[..., None]), strict=True):
        assert distance(x, y) <= 2e-6


@pytest.mark.parametrize("chunk_size", [16, 40, 64, 128, 256])
def test_chunks_of_any_size_mean_the_same(chunk_size: int) -> None:
    args = inputs(1, 2, 300, 16, 16)
    truth = recurrent(*(x.double() for x in args))[0]
    assert distance(metalcore.mlstm_chunkwise(*args, chunk_size=chunk_size), truth) <= 2e-6


@pytest.mark.parametrize("T", [64, 2048, 8192])
def test_gradients_do_not_lose_digits_with_length(T: int) -> None:
    args, seed = inputs(1, 1, T, 16, 16), torch.randn(1, 1, T, 16)

    def grads(*args: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in args]
        h = metalcore.mlstm_chunkwise(*leaves)
        return h, *torch.autograd.grad(h, leaves, seed.to(h.dtype))

    for x, y in zip(grads(*args), grads(*(x.double() for x in args)), strict=True):
        assert distance(x, y) <= 2e-6


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 17, 63, 64, 65, 100])
def test_a_sequence_may_be_cut_anywhere(cut: int) -> None:
    leaves = [x.requires_grad_() for x in inputs(1, 2, 100, 8, 12, torch.float64)]
    whole, last = metalcore.mlstm_chunkwise(*leaves, return_last_states=True)
    first, between = metalcore.mlstm_chunkwise(
        *(x[:, :, :cut] for x in leaves), return_last_states=True
    )
    c, n, m = between
    rest, end = metalcore.mlstm_chunkwise(
        *(x[:, :, cut:] for x in leaves),
        c_initial=c,
        n_initial=n,
        m_initial=m,
        return_last_states=True,
    )
    parts = torch.cat([first, rest], 2)
    close = torch.testing.assert_close
    close(parts, whole)
    for x, y in zip(end, last, strict=True):
        close(x, y)
    weights = [torch.randn_like(x) for x in (whole, *last)]
    of_whole = torch.autograd.grad((whole, *last), leaves, weights)
    of_parts = torch.autograd.grad((parts, *end), leaves, weights)
    for x, y in zip(of_parts, of_whole, strict=True):
        close(x, y)


@pytest.mark.parametrize("gates", [(15, 3), (-15, 3), (100, 3), (-40, 3), (2, -30), (100, -30)])
@pytest.mark.parametrize("zero", ["", "q", "k", "v"])
def test_extreme_gates(gates: tuple[float, float], zero: str) -> None:
    q, k, v, i, f = inputs(1, 2, 130, 8, 8)
    i, f = i + gates[0], f + gates[1]
    args = [x * (name != zero) for name, x in zip("qkvif", (q, k, v, i, f), strict=True)]

    def results(*args: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in args]
        h, last = metalcore.mlstm_chunkwise(*leaves, return_last_states=True)
        return h, *last, *torch.autograd.grad(h.sum(), leaves)

    found = results(*args)
    truth, states = recurrent(*(x.double() for x in args))
    assert all(x.isfinite().all() for x in found)
    # where input gates are large, divisors cancel, and how much is lost depends on the numbers
    exact = results(*(x.double() for x in args))
    torch.testing.assert_close(exact[0], truth)
    torch.testing.assert_close(exact[3], states[2][..., None])
    lost = 1e-3 if gates[0] > 0 and not zero else 1e-5
    if truth.norm() > 1e-30:
        assert distance(found[0], truth) <= lost


def test_packed_sequences_are_each_on_their_own() -> None:
    starts = torch.tensor([0, 5, 5, 70, 71])
    q, k, v, i, f = (x[0].transpose(0, 1) for x in inputs(1, 2, 71, 8, 6, torch.float64))
    before = states(4, 2, 8, 6, torch.float64)
    names = ("c_initial", "n_initial", "m_initial")
    leaves = [x.requires_grad_() for x in (q, k, v, i, f, *before)]
    how: dict[str, Any] = dict(zip(names, before, strict=True))
    h, last = metalcore.mlstm_chunkwise(
        q, k, v, i, f, cu_seqlens=starts, return_last_states=True, **how
    )
    assert h.is_contiguous()
    parts, ends = [], []
    for n, (a, b) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        rows = (x[a:b].transpose(0, 1)[None] for x in (q, k, v, i, f))
        own: dict[str, Any] = {name: x[n : n + 1] for name, x in how.items()}
        y, of = metalcore.mlstm_chunkwise(*rows, return_last_states=True, **own)
        parts.append(y[0].transpose(0, 1))
        ends.append(of)
    alone = (torch.cat(parts), *map(torch.cat, zip(*ends, strict=True)))
    for x, y in zip((h, *last), alone, strict=True):
        assert torch.equal(x, y)
    weights = [torch.randn_like(x) for x in alone]
    packed = torch.autograd.grad((h, *last), leaves, weights)
    for x, y in zip(packed, torch.autograd.grad(alone, leaves, weights), strict=True):
        torch.testing.assert_close(x, y)
    args = (*(x.transpose(0, 1)[None] for x in (q, k, v, i, f)), *before, starts, *EXACT, 16)
    check_op(Backend("cpu"), OP, [x.detach() if isinstance(x, Tensor) else x for x in args],
             reduces_over=80)  # fmt: skip


def test_bits_do_not_depend_on_threads() -> None:
    leaves = [x.requires_grad_() for x in inputs(1, 1, 150, 32, 100)]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            h = metalcore.mlstm_chunkwise(*leaves)
            found.append([h, *torch.autograd.grad(h.square().sum(), leaves)])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("rule", list(RULES))
def test_gradients_by_the_op_itself(rule: str) -> None:
    for dtype in (torch.float32, torch.float64):
        args = _args((1, 2, 40, 9, 10, 16), RULES[rule], dtype)
        h, c, n, m = torch.ops.metalcore.mlstm_chunkwise(*args)
        given = tuple(map(torch.randn_like, (h, c, n, m)))
        check_op(
            Backend("cpu"), f"{OP}_backward", (*given, *args), reduces_over=128,
            differentiable=False,
        )  # fmt: skip


def test_derivatives_and_registration() -> None:
    args = _args((1, 1, 3, 2, 2, 16), EXACT, torch.float64)
    check_registration(OP, args)


def test_the_gradient_of_mlstm_kernels() -> None:
    native = pytest.importorskip("mlstm_kernels.torch.chunkwise.native")
    args, seed = inputs(1, 2, 128, 16, 16), torch.randn(1, 2, 128, 16)

    def grads(function: Any, **how: Any) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in args]
        h = function(*leaves, chunk_size=64, **how)
        return h, *torch.autograd.grad(h, leaves, seed)

    theirs = grads(native.mlstm_chunkwise__native_custbw)
    ours = grads(metalcore.mlstm_chunkwise, grad="nx")
    for x, y in zip(ours, theirs, strict=True):
        # sums over all steps in float32 are theirs
        assert distance(x, y.double()) <= 1e-5


def test_compiles_and_has_shapes_without_data() -> None:
    args = inputs(1, 2, 20, 8, 8)

    def function(q: Tensor) -> Tensor:
        return metalcore.mlstm_parallel(q, *args[1:])

    leaves = [args[0].clone().requires_grad_() for _ in range(2)]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    grads = [
        torch.autograd.grad(call(leaf).square().sum(), leaf)[0]
        for call, leaf in zip((function, compiled), leaves, strict=True)
    ]
    assert torch.equal(*grads)
    h, (c, n, m) = metalcore.mlstm_chunkwise(*(x.to("meta") for x in args), return_last_states=True)
    assert (h.shape, c.shape, n.shape, m.shape) == (
        *((1, 2, 20, 8), (1, 2, 8, 8)),
        *((1, 2, 8), (1, 2, 1)),
    )


def test_wrong_arguments() -> None:
    q, k, v, i, f = inputs(1, 2, 5, 4, 4)
    call = metalcore.mlstm_chunkwise
    with pytest.raises(ValueError, match="mlstm_chunkwise: k must have the shape"):
        call(q, k[..., :3], v, i, f)
    with pytest.raises(ValueError, match="must be given together"):
        call(q, k, v, i, f, c_initial=torch.zeros(1, 2, 4, 4))
    with pytest.raises(ValueError, match="normalize=False is for gate='sigmoid'"):
        call(q, k, v, i, f, normalize=False)
    with pytest.raises(ValueError, match="chunk_size must be from 16 to 256"):
        call(q, k, v, i, f, chunk_size=8)
    rows = (x[0] for x in (q, k, v, i, f))
    with pytest.raises(ValueError, match="cu_seqlens must ascend from 0 to the 2 steps"):
        call(*rows, cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(TypeError, match="gates must be no wider"):
        call(q, k, v, i.double(), f)
