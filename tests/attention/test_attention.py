# SPDX-License-Identifier: MIT
"""Attention: values, lse and every gradient, over all arguments."""

from math import inf, nan
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore.metal.plans import PLANS, Spec
from tests.attention.arguments import CASES, Case, problems, sees
from tests.backends import Backend
from tests.check import check_op, check_registration
from tests.strategies import dtypes, layouts


@pytest.mark.parametrize("case", CASES, ids=[c.why for c in CASES])
def test_matches_reference(backend: Backend, case: Case) -> None:
    # a simulated kernel takes seconds: one dtype for each case, all of them in turn
    at = CASES.index(case) % len(backend.dtypes)
    for dtype in backend.dtypes if backend.name == "cpu" else backend.dtypes[at : at + 1]:
        check_op(backend, "attention", case.args(dtype), reduces_over=case.reduces_over)


@given(st.data(), problems, dtypes)
def test_any_arguments_in_any_layout(data: st.DataObject, case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v, *rest = case.args(dtype)
    q, k, v = (data.draw(layouts(x)) for x in (q, k, v))
    check_op(Backend("cpu"), "attention", (q, k, v, *rest), reduces_over=case.reduces_over)


def test_gradients_by_the_op_itself(backend: Backend) -> None:
    for dtype in backend.dtypes:
        q, k, v = (torch.randn(2, 3, 40, 24).to(dtype) for _ in range(3))
        numbers = (*(None,) * 5, 0.2, None, None, 0)
        out, lse = torch.ops.metalcore.attention(q, k, v, *numbers)
        args = (torch.randn_like(out), torch.randn_like(lse), out, lse, q, k, v, *numbers)
        check_op(backend, "attention_backward", args, reduces_over=64, differentiable=False)


def test_keys_that_no_head_asks_for() -> None:
    q, k, v = torch.randn(2, 0, 3, 4), torch.randn(2, 1, 5, 4), torch.randn(2, 1, 5, 6)
    numbers = (*(None,) * 5, 0.2, None, None, 0)
    out, lse = torch.ops.metalcore.attention(q, k, v, *numbers)
    args = (out, lse, out, lse, q, k, v, *numbers)
    check_op(Backend("cpu"), "attention_backward", args, reduces_over=5, differentiable=False)


@pytest.mark.parametrize("H", [4, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_torch_where_both_mean_the_same(dtype: torch.dtype, H: int) -> None:
    q, k, v = (torch.randn(2, n, 70, 32).to(dtype) for n in (4, H, H))
    mask = torch.rand(2, 1, 70, 70) > 0.3
    for ours, theirs in (
        ({}, {}),
        ({"causal": True}, {"is_causal": True}),
        ({"mask": mask, "scale": 0.3}, {"attn_mask": mask, "scale": 0.3}),
    ):
        truth = F.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), enable_gqa=True, **theirs
        )
        y = metalcore.attention(q, k, v, **ours)
        assert y.dtype == dtype
        assert error(y, truth) <= tolerance("attention", dtype, 70)


@pytest.mark.parametrize("window", [None, 1, 3, (2, 0), (-1, 0), (4, -1), (2, 3)])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize(("Tq", "Tk"), [(9, 9), (5, 12), (12, 5)])
def test_causal_and_window_count_from_the_last_key(
    Tq: int, Tk: int, causal: bool, window: Any
) -> None:
    if causal and isinstance(window, tuple) and window[1] > 0:
        return
    left, right = (window - 1, window - 1) if isinstance(window, int) else window or (-1, -1)
    rows = range(Tk - Tq, Tk)
    visible = torch.tensor([[sees(j - i, left, right, causal) for j in range(Tk)] for i in rows])
    q, k, v = torch.randn(1, 2, Tq, 8), torch.randn(1, 2, Tk, 8), torch.randn(1, 2, Tk, 8)
    found = metalcore.attention(q, k, v, causal=causal, window=window, return_lse=True)
    expected = metalcore.attention(q, k, v, mask=visible, return_lse=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_alibi_takes_slope_times_distance() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8)
    slopes = torch.rand(2, 4)
    distance = (torch.arange(9) - torch.arange(4, 9)[:, None]).abs()
    bias = -slopes[:, :, None, None] * distance
    found = metalcore.attention(q, k, v, alibi_slopes=slopes)
    torch.testing.assert_close(found, metalcore.attention(q, k, v, mask=bias))


def test_a_sink_is_a_key_without_a_value() -> None:
    q, k, v, sinks = (torch.randn(s) for s in ((2, 3, 6, 8), (2, 3, 5, 8), (2, 3, 5, 4), (3,)))
    keys = torch.cat([k, torch.zeros(2, 3, 1, 8)], 2)
    values = torch.cat([v, torch.zeros(2, 3, 1, 4)], 2)
    bias = torch.cat([torch.zeros(3, 6, 5), sinks.view(3, 1, 1).expand(3, 6, 1)], 2)
    found = metalcore.attention(q, k, v, sinks=sinks, return_lse=True)
    expected = metalcore.attention(q, keys, values, mask=bias, return_lse=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences_are_each_on_their_own(dtype: torch.dtype) -> None:
    lengths = [(5, 9), (0, 3), (40, 40), (3, 0), (7, 200)]
    starts = torch.tensor([(0, 0), *lengths]).cumsum(0).to(dtype)
    q, k, v = (torch.randn(n, h, 16) for n, h in ((55, 4), (252, 2), (252, 2)))
    packed = {"cu_seqlens_q": starts[:, 0], "cu_seqlens_k": starts[:, 1]}
    out, lse = metalcore.attention(q, k, v, causal=True, return_lse=True, **packed)
    assert out.is_contiguous()
    for (a, c), (b, d) in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        alone = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        y, of = metalcore.attention(*alone, causal=True, return_lse=True)
        assert torch.equal(out[a:b].transpose(0, 1), y)
        assert torch.equal(lse[:, a:b], of)


def test_queries_without_keys_give_zeros() -> None:
    q, k = torch.randn(2, 4, 6, 8, requires_grad=True), torch.randn(2, 4, 6, 8, requires_grad=True)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    mask[0, 0, 2] = False
    for given_mask in (mask, torch.zeros(mask.shape).masked_fill(~mask, -inf)):
        out, lse = metalcore.attention(q, k, k, mask=given_mask, return_lse=True)
        assert (out[0, :, 2] == 0).all()
        assert (lse[0, :, 2] == -inf).all()
        assert lse[1].isfinite().all()
        grads = torch.autograd.grad(out.square().sum() + lse[1].sum(), (q, k))
        assert all(g.isfinite().all() for g in grads)
        assert (grads[0][0, :, 2] == 0).all()
    sinks = torch.randn(4)
    out, lse = metalcore.attention(q, k[:, :, :0], k[:, :, :0], sinks=sinks, return_lse=True)
    assert (out == 0).all()
    torch.testing.assert_close(lse, sinks.view(4, 1).expand(2, 4, 6))


@pytest.mark.parametrize("size", [0, 1, 3])
def test_empty_tensors(size: int) -> None:
    for B, H, Tq, Tk, D in ((0, 2, 3, 3, 4), (2, 0, 3, 3, 4), (2, 2, 0, 3, 4), (2, 2, 3, 0, 4)):
        q, k, v = torch.randn(B, H, Tq, D), torch.randn(B, H, Tk, D), torch.randn(B, H, Tk, size)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = metalcore.attention(*leaves, return_lse=True)
        assert out.shape == (B, H, Tq, size)
        assert (out == 0).all()
        assert (lse == -inf).all()
        for x, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
            assert grad.shape == x.shape
            assert (grad == 0).all()


HIDDEN_BY = {
    "causal": {"causal": True},
    "window": {"window": (-1, 10)},
    "mask": {"mask": torch.ones(150, 150, dtype=torch.bool).tril()},
    "numbers": {"mask": torch.zeros(150, 150).masked_fill(torch.ones(150, 150).triu(1) > 0, -inf)},
}


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("by", list(HIDDEN_BY))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_a_query_does_not_see_changes_nothing(
    by: str, value: float, dtype: torch.dtype
) -> None:
    q, k, v = (torch.randn(1, 2, 150, 20).to(dtype) for _ in range(3))
    broken = [k.clone(), v.clone()]
    for x in broken:
        x[:, :, 140] = value
    unaffected = 130 if by == "window" else 140

    def run(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        leaf = q.clone().requires_grad_()
        out, lse = metalcore.attention(leaf, k, v, return_lse=True, **HIDDEN_BY[by])
        kept = out[:, :, :unaffected].square().sum() + lse[:, :, :unaffected].sum()
        (dq,) = torch.autograd.grad(kept, leaf)
        return out, lse, dq

    for a, b in zip(run(k, v), run(*broken), strict=True):
        assert torch.equal(a[:, :, :unaffected], b[:, :, :unaffected])
    out = run(k, broken[1])[0]
    assert not out[:, :, unaffected:].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_queries_do_not_see_more_than_many(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 4, n, 20).to(dtype) for n in (4, 100, 100))
    seen = metalcore.attention(q, k, v, causal=True)
    for x in (k, v):
        x[:, :, 98:] = nan
    found = metalcore.attention(q, k, v, causal=True)
    assert torch.equal(found[:, :, :2], seen[:, :, :2])
    assert found[:, :, 2:].isnan().all()
    keep = torch.arange(100) < 98
    torch.testing.assert_close(
        metalcore.attention(q, k, v, mask=keep), metalcore.attention(q, k[:, :, :98], v[:, :, :98])
    )


def test_keys_and_queries_of_a_padding_may_hold_anything() -> None:
    q, k, v = (torch.randn(2, 2, 40, 16) for _ in range(3))
    keep = torch.ones(2, 1, 40, 40, dtype=torch.bool)
    keep[1, :, 30:], keep[1, :, :, 30:] = False, False

    def run(value: float) -> list[Tensor]:
        leaves = [x.clone() for x in (q, k, v)]
        for x in leaves:
            x[1, :, 30:] = value
            x.requires_grad_()
        out = metalcore.attention(*leaves, mask=keep)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for a, b in zip(run(0.5), run(nan), strict=True):
        assert torch.equal(a, b)


def test_numbers_that_overflow_in_other_units() -> None:
    q, k, v = (torch.randn(1, 1, 6, 8) for _ in range(3))
    least = torch.full((6, 6), torch.finfo(torch.float32).min)
    torch.testing.assert_close(
        metalcore.attention(q, k, v, mask=least), v.mean(2, keepdim=True).expand(v.shape)
    )
    for scale in (-1.5, 0.0, 80.0):
        y = metalcore.attention(q, k, v, scale=scale)
        truth = torch.softmax(scale * q.double() @ k.double().mT, -1) @ v.double()
        # what products are rounded by grows with the scale
        assert error(y, truth) <= tolerance("attention", y.dtype, 8) * max(1.0, abs(scale))


def test_bits_do_not_depend_on_threads_or_neighbours() -> None:
    q, k, v = torch.randn(3, 4, 200, 32), torch.randn(3, 2, 1100, 32), torch.randn(3, 2, 1100, 32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out, lse = metalcore.attention(*leaves, causal=True, return_lse=True)
            found.append([out, lse, *torch.autograd.grad(out.square().sum(), leaves)])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    alone = metalcore.attention(q[1:2], k[1:2], v[1:2], causal=True)
    assert torch.equal(alone[0], found[0][0][1])


def test_views_of_projections_are_neither_copied_nor_is_the_result() -> None:
    x = torch.randn(2, 9, 3 * 4 * 16)
    q, k, v = (y.transpose(1, 2) for y in x.view(2, 9, 3, 4, 16).unbind(2))
    y = metalcore.attention(q, k, v, causal=True)
    assert y.transpose(1, 2).is_contiguous()
    dense = metalcore.attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    assert torch.equal(y, dense)
    single = metalcore.attention(q[0], k[0], v[0], causal=True)
    assert torch.equal(single, y[0])


def test_variants_are_traced() -> None:
    k = torch.randn(1, 1, 1024, 8)
    for queries, variant in ((4, "few_queries"), (5, "panels")):
        q = torch.randn(1, 1, queries, 8, requires_grad=True)
        with metalcore.trace() as t:
            metalcore.attention(q, k, k).sum().backward()
        assert [(r.op, r.variant) for r in t.records] == [
            ("attention", variant),
            ("attention_backward", "panels_split"),
        ]


def test_the_gradient_of_a_mask_is_torch_and_traced() -> None:
    q = torch.randn(1, 2, 5, 8)
    mask = torch.randn(1, 1, 5, 5, requires_grad=True)
    with metalcore.trace() as t:
        metalcore.attention(q, q, q, mask=mask).sum().backward()
    assert "torch" in t.paths["attention_backward"]


def test_derivatives_and_registration() -> None:
    q, k, v = torch.randn(1, 2, 2, 2), torch.randn(1, 1, 3, 2), torch.randn(1, 1, 3, 1)
    mask, slopes, sinks = torch.randn(1, 1, 1, 3), torch.rand(2), torch.randn(2)
    starts = (torch.tensor([0, 1, 2]), torch.tensor([0, 2, 3]))
    numbers = (0.5, 3.0, 2, 0)
    check_registration("attention", (q, k, v, mask, slopes, sinks, *starts, *numbers))


def test_compiles_without_graph_breaks() -> None:
    k = torch.randn(2, 2, 40, 16)
    starts = torch.tensor([0, 10, 40])

    def packed(q: Tensor) -> Tensor:
        keys = k[0].transpose(0, 1)
        return metalcore.attention(q, keys, keys, cu_seqlens_q=starts, cu_seqlens_k=starts)

    def dense(q: Tensor) -> Tensor:
        return metalcore.attention(q, k, k, causal=True, window=9, softcap=3.0)

    for function, q in ((dense, torch.randn(2, 4, 40, 16)), (packed, torch.randn(40, 4, 16))):
        leaves = [q.clone().requires_grad_() for _ in range(2)]
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        grads = []
        for call, leaf in zip((function, compiled), leaves, strict=True):
            y = call(leaf)
            grads += torch.autograd.grad(y.square().sum(), leaf)
        assert torch.equal(*grads)


def test_function_transforms() -> None:
    q, k = torch.randn(3, 2, 4, 5, 8), torch.randn(3, 2, 4, 7, 8)

    def loss(q: Tensor, k: Tensor) -> Tensor:
        return metalcore.attention(q, k, k, causal=True).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss))(q, k)
    for i in range(3):
        torch.testing.assert_close(per_sample[i], torch.func.grad(loss)(q[i], k[i]))


def test_autocast_and_meta_tensors() -> None:
    q = torch.randn(1, 2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert metalcore.attention(q, q, q).dtype == torch.bfloat16
    m = q.to("meta")
    out, lse = metalcore.attention(m, m, m, causal=True, return_lse=True)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (1, 2, 5), torch.float32)


def test_rows_that_32_bits_cannot_reach_are_left_to_the_meaning() -> None:
    q = Spec.contiguous((1, 2, 64, 64))
    near, far = (Spec((1, 2, 64, 64), torch.float32, (2**40, 64, n, 1)) for n in (2**25, 2**27))
    names = [a.name for a in torch.ops.metalcore.attention.default._schema.arguments]
    programs = [
        PLANS["attention"].program([{"q": q, "k": k, "v": k, "scale": 1.0}.get(n) for n in names])
        for k in (near, far)
    ]
    assert [p is not None for p in programs] == [True, False]
