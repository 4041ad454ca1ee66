# SPDX-License-Identifier: MIT
"""Attention over pages: it equals attention over the keys in order, and reads no others."""

from math import nan
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore._op import Op
from tests.attention.pages import CASES, Pages
from tests.backends import Backend
from tests.check import check_op


@pytest.mark.parametrize("case", CASES, ids=[c.why for c in CASES])
def test_matches_reference(backend: Backend, case: Pages) -> None:
    # a simulated kernel takes seconds: one dtype for each case, all of them in turn
    at = CASES.index(case) % len(backend.dtypes)
    for dtype in backend.dtypes if backend.name == "cpu" else backend.dtypes[at : at + 1]:
        over = case.reduces_over
        args = case.args(dtype)
        check_op(backend, "paged_attention", args, reduces_over=over, differentiable=False)


def test_what_no_sequence_has_changes_nothing() -> None:
    for case in CASES:
        args = case.args(torch.float32)
        y, lse = Op.all["paged_attention"](*args)
        assert y.isfinite().all(), case
        assert not lse.isnan().any(), case


_lengths = st.lists(st.integers(0, 200), min_size=1, max_size=3)


@given(
    _lengths,
    st.sampled_from([1, 2, 16, 64]),
    st.sampled_from(["", "int8", "float8"]),
    st.sampled_from([(4, 1), (2, 2), (6, 3)]),
    st.sampled_from([1, 3, 20]),
    st.sampled_from([None, 1, 30]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_any_sequences(
    lengths: list[int],
    page: int,
    stored: str,
    heads: tuple[int, int],
    most: int,
    left: int | None,
    rows: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    queries = tuple(min(most, n) for n in lengths)
    case = Pages(
        "",
        lengths=tuple(lengths),
        queries=queries,
        page=page,
        heads=heads,
        stored=stored,
        packed=True,
        rows=rows,
        left=left,
    )
    args, over = case.args(dtype), case.reduces_over
    check_op(Backend("cpu"), "paged_attention", args, reduces_over=over, differentiable=False)


@pytest.mark.parametrize("Tq", [1, 4, 30])
def test_equals_attention_of_the_keys_in_order(Tq: int) -> None:
    B, T, page = 2, 90, 16
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.randn(B, 4, Tq, 32).to(dtype)
        k, v = (torch.randn(B, 2, T, 32).to(dtype) for _ in range(2))
        table = torch.randperm(12).view(2, 6).int()
        key = torch.arange(T)
        slots = table[:, key // page] * page + key % page
        caches = [torch.full((12, page, 2, 32), nan, dtype=dtype) for _ in range(2)]
        metalcore.paged_write(k, v, *caches, slots)
        how: dict[str, Any] = {"window": 50, "softcap": 4.0}
        y, lse = metalcore.paged_attention(
            q, *caches, table, torch.tensor([T, T]), return_lse=True, **how
        )
        doubles = (x.double() for x in (q, k, v))
        truth, of = metalcore.attention(*doubles, causal=True, return_lse=True, **how)
        assert error(y, truth) <= tolerance("paged_attention", dtype, T)
        assert error(lse, of) <= tolerance("paged_attention", dtype, T)
        # rows of their own
        starts = {"cu_seqlens_q": torch.arange(3) * Tq, "cu_seqlens_k": torch.arange(3) * T}
        packed = q.transpose(1, 2).flatten(0, 1)
        rows = (x.flatten(0, 1) for x in caches)
        again = metalcore.paged_attention(packed, *rows, slots.flatten(), **starts, **how)
        assert torch.equal(again.view(B, Tq, 4, 32).transpose(1, 2), y)


def test_keys_of_a_page_that_is_not_there_are_not_seen() -> None:
    case = Pages("", lengths=(150,), queries=(1,), heads=(2, 1))
    _, k, v, *_ = case.args(torch.float32)
    for Tq in (1, 12):
        q = torch.randn(1, 2, Tq, 16)
        table = case.args(torch.float32)[5]
        holes = table.clone()
        holes[0, 1:4] = -1
        y = metalcore.paged_attention(q, k, v, holes, torch.tensor([150]))
        keys, values = (x[table[0]].flatten(0, 1)[:150].transpose(0, 1)[None] for x in (k, v))
        mask = torch.ones(150, dtype=torch.bool)
        mask[16:64] = False
        expected = metalcore.attention(q, keys, values, causal=True, mask=mask)
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize(("stored", "allowed"), [("int8", 0.012), ("float8", 0.05)])
def test_the_error_of_8_bits_is_as_stated(stored: str, allowed: float) -> None:
    """docs/attention.md states it for normal numbers, as a ratio of 2-norms."""
    B, T, page = 1, 1024, 16
    q, k, v = (torch.randn(B, 4, n, 128) for n in (1, T, T))
    slots = torch.arange(T)[None]
    kind = {"int8": torch.int8, "float8": torch.float8_e4m3fn}[stored]
    caches = [torch.zeros(T // page, page, 4, 128, dtype=kind) for _ in range(2)]
    scales = [torch.zeros(T // page, page, 4) for _ in range(2)]
    both = {"k_scale": scales[0], "v_scale": scales[1]}
    metalcore.paged_write(k, v, *caches, slots, **both)
    table, lengths = torch.arange(T // page)[None], torch.tensor([T])
    y = metalcore.paged_attention(q, *caches, table, lengths, **both)
    truth = metalcore.attention(q.double(), k.double(), v.double(), causal=True)
    off = ((y - truth).norm() / truth.norm()).item()
    assert allowed / 4 < off < allowed


def test_a_masked_token_that_is_not_finite_changes_nothing() -> None:
    for stored in ("", "int8", "float8"):
        case = Pages("", lengths=(40,), queries=(2,), heads=(2, 1), stored=stored, left=5)
        q, k, v, k_scale, v_scale, table, *rest = case.args(torch.float32)
        expected = Op.all["paged_attention"](q, k, v, k_scale, v_scale, table, *rest)
        # seen by none
        at = (table[0, 1], 3)
        for x, s in ((k, k_scale), (v, v_scale)):
            x[at] = nan if not stored else 0x7F
            if s is not None:
                s[at] = nan
        found = Op.all["paged_attention"](q, k, v, k_scale, v_scale, table, *rest)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


def test_bits_do_not_depend_on_threads_or_neighbours() -> None:
    case = Pages("", lengths=(3000, 700), heads=(8, 2), size=(32, 32))
    args = list(case.args(torch.float32))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(Op.all["paged_attention"](*args)[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found)
    alone = [args[0][1:], *args[1:5], args[5][1:], args[6][1:], *args[7:]]
    assert torch.equal(Op.all["paged_attention"](*alone)[0], found[0][1:])


def test_registration_and_compile() -> None:
    args = CASES[0].args(torch.float32)
    torch.library.opcheck(torch.ops.metalcore_kernels.paged_attention.default, args)
    q, k, v, _, _, table, lengths, *_ = args

    def call(q: torch.Tensor) -> torch.Tensor:
        return metalcore.paged_attention(q, k, v, table, lengths)

    run = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(q), call(q))


q, k, v, _, _, table, lengths, *_ = CASES[0].args(torch.float32)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": q[0]}, ValueError, "q must be [B, H, Tq, D], got [4, 1, 16]"),
    (
        {"k_cache": k[:, :15], "v_cache": v[:, :15]},
        ValueError,
        "a page must have a power of two of rows, got 15",
    ),
    (
        {"v_cache": v[:3]},
        ValueError,
        "both caches must be [pages, page, Hk, D]; got [8, 16, 2, 16] and [3, 16, 2, 16]",
    ),
    (
        {"q": q.half()},
        TypeError,
        "the cache must be float16, int8, float8_e4m3fn or uint8; "
        "got k_cache float32 and v_cache float32",
    ),
    (
        {"k_cache": k.to(torch.int8), "v_cache": v.to(torch.int8)},
        ValueError,
        "k_scale must be given for int8, the number that each code is times",
    ),
    ({"block_table": table.float()}, TypeError, "block_table must be int32 or int64, got float32"),
    (
        {"block_table": table + 5},
        ValueError,
        "block_table must hold -1 or one of the 8 pages; got 4 to 12",
    ),
    ({"lengths": None}, ValueError, "lengths must be given, or cu_seqlens_k"),
    (
        {"lengths": torch.tensor([1, 65])},
        ValueError,
        "lengths must be from 0 to the 64 keys of the cache, got [1, 65]",
    ),
    (
        {"q": q[:1]},
        ValueError,
        "q and its keys must be of as many sequences, got 1 and 2",
    ),
    (
        {"q": q[:, :3]},
        ValueError,
        "the 3 heads of q must be a multiple of the 2 of the cache",
    ),
    ({"window": 0}, ValueError, "window must be at least 1, the key itself, got 0"),
]


@pytest.mark.parametrize(("others", "kind", "message"), BAD, ids=[b[2] for b in BAD])
def test_bad_input_is_named(others: dict[str, Any], kind: type[Exception], message: str) -> None:
    given = {"q": q, "k_cache": k, "v_cache": v, "block_table": table, "lengths": lengths}
    with pytest.raises(kind) as caught:
        metalcore.paged_attention(**(given | others))
    assert str(caught.value) == f"paged_attention: {message}"
