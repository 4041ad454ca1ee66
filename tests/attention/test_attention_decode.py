# SPDX-License-Identifier: MIT
"""Attention over a cache: it equals attention over the keys that are there, and reads no others."""

from math import nan
from typing import Any

import pytest
import torch

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore.bench.counters import recorded
from metalcore.ops.attention._eight_bit import encoded
from tests.backends import Backend
from tests.check import check_op


def cache(
    B: int, H: int, Hk: int, Tq: int, T: int, D: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    sizes = ((B, H, Tq, D), (B, Hk, T, D), (B, Hk, T, D))
    return tuple(torch.randn(size).to(dtype) for size in sizes)


OTHERS: list[dict[str, Any]] = [
    {},
    {"softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    {"alibi_slopes": torch.rand(3, 4), "scale": 0.3},
    {"window": 40},
]


@pytest.mark.parametrize("others", OTHERS, ids=["plain", "cap and sinks", "slopes", "window"])
@pytest.mark.parametrize("Tq", [1, 3, 6])
def test_equals_attention_of_the_keys_that_are_there(Tq: int, others: dict[str, Any]) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        q, k, v = cache(3, 4, 2, Tq, 700, 24, dtype)
        lengths = torch.tensor([700, 129, Tq])
        for b, n in enumerate(lengths.tolist()):
            k[b, :, n:], v[b, :, n:] = nan, nan
        y = metalcore.attention_decode(q, k, v, lengths=lengths, **others)
        assert y.dtype == dtype
        for b, n in enumerate(lengths.tolist()):
            own = dict(others)
            if "alibi_slopes" in own:
                own["alibi_slopes"] = own["alibi_slopes"][b]
            alone = (x[b].double() for x in (q, k[:, :, :n], v[:, :, :n]))
            truth = metalcore.attention(*alone, causal=True, **own)
            assert error(y[b], truth) <= tolerance("attention_decode", dtype, 700)


def test_matches_reference(backend: Backend) -> None:
    for dtype in backend.dtypes:
        q, k, v = cache(2, 6, 2, 2, 600, 40, dtype)
        slopes, sinks = torch.rand(6), torch.randn(6)
        for lengths in (None, torch.tensor([600, 77], dtype=torch.int32)):
            args = (q, k, v, None, None, lengths, slopes, sinks, 0.2, 5.0, 300)
            check_op(backend, "attention_decode", args, reduces_over=640, differentiable=False)


SIZES = [((6, 1), 1, 128), ((4, 1), 8, 64), ((2, 2), 3, 256), ((4, 2), 20, 32)]


@pytest.mark.parametrize(("heads", "Tq", "D"), SIZES)
def test_sizes_of_models(heads: tuple[int, int], Tq: int, D: int) -> None:
    """Groups of heads and queries in one tile, in several, and of many queries."""
    at = [s[1:] for s in SIZES].index((Tq, D)) % 3
    with Backend("sim") as backend:
        dtype = backend.dtypes[at]
        q, k, v = cache(1, *heads, Tq, 300, D, dtype)
        args = (q, k, v, None, None, torch.tensor([290]), None, None, 0.1, None, None)
        check_op(backend, "attention_decode", args, reduces_over=640, differentiable=False)


@pytest.mark.parametrize("Tq", [1, 3, 20])
@pytest.mark.parametrize("stored", [torch.int8, torch.uint8], ids=str)
def test_8_bits_match_reference(backend: Backend, stored: torch.dtype, Tq: int) -> None:
    for dtype in backend.dtypes if backend.name == "cpu" else backend.dtypes[Tq % 3 :][:1]:
        q, *numbers = cache(2, 6, 2, Tq, 600, 40, dtype)
        (k, k_scale), (v, v_scale) = (encoded(x, stored, has_scale=True) for x in numbers)
        one = torch.tensor(0.01).expand(2, 2, 600)
        for scales in ((k_scale, v_scale), (one, None)):
            if stored == torch.int8 and scales[1] is None:
                continue
            args = (q, k, v, *scales, torch.tensor([600, 77]), None, None, 0.2, None, 300)
            check_op(backend, "attention_decode", args, reduces_over=640, differentiable=False)


@pytest.mark.parametrize("stored", [torch.float16, torch.int8], ids=str)
def test_metal_reads_the_cache_once(stored: torch.dtype) -> None:
    """For 8 heads that share it, with all that parts write and read: at most 1.1 of what it is."""
    q, k, v = cache(1, 8, 1, 1, 1100, 128, torch.float16)
    scales: dict[str, Any] = {}
    if stored == torch.int8:
        (k, a), (v, b) = (encoded(x, stored, has_scale=True) for x in (k, v))
        scales = {"k_scale": a, "v_scale": b}
    with recorded(checked=False) as (_, profiles):
        metalcore.attention_decode(q, k, v, **scales)
    least = sum(x.nbytes for x in (k, v, *scales.values(), q, q))
    assert len(profiles) == 2
    assert least <= sum(p.moved for p in profiles) <= 1.1 * least


def test_8_bits_may_be_float8_or_its_codes() -> None:
    q, k, v = cache(1, 4, 2, 1, 20, 16)
    k8, v8 = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    expected = metalcore.attention_decode(q, k8.float(), v8.float())
    found = metalcore.attention_decode(q, k8, v8)
    assert error(found, expected) <= tolerance("attention_decode", torch.float32, 20)
    assert torch.equal(
        metalcore.attention_decode(q, k8.view(torch.uint8), v8.view(torch.uint8)), found
    )


def test_entries_without_keys_give_zeros() -> None:
    q, k, v = cache(2, 2, 2, 2, 5, 8)
    y = metalcore.attention_decode(q, k, v, lengths=torch.tensor([0, 1]))
    assert (y[0] == 0).all()
    assert (y[1, :, 0] == 0).all()
    torch.testing.assert_close(y[1, :, 1], v[1, :, 0])


def test_a_view_of_a_larger_cache_is_read_where_it_is() -> None:
    q, k, v = cache(2, 4, 2, 1, 64, 16)
    rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    lengths = torch.tensor([50, 64])
    expected = metalcore.attention_decode(q, k, v, lengths=lengths)
    assert torch.equal(metalcore.attention_decode(q, *rows, lengths=lengths), expected)
    with metalcore.trace() as t:
        metalcore.attention_decode(q, k, v)
    assert [(r.op, r.variant) for r in t.records] == [("attention_decode", "few_queries")]


def test_bits_do_not_depend_on_threads() -> None:
    q, k, v = cache(2, 8, 2, 1, 3000, 32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(metalcore.attention_decode(q, k, v))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found)


def test_registration_and_compile() -> None:
    q, k, v = cache(1, 2, 1, 1, 5, 4)
    args = (q, k, v, None, None, torch.tensor([3]), None, None, 0.5, None, None)
    torch.library.opcheck(torch.ops.metalcore_kernels.attention_decode.default, args)
    run = torch.compile(
        lambda q: metalcore.attention_decode(q, k, v, lengths=torch.tensor([3])),
        fullgraph=True,
        backend="aot_eager",
    )
    expected = metalcore.attention_decode(q, k, v, lengths=torch.tensor([3]))
    assert torch.equal(run(q), expected)


q, k, v = cache(2, 4, 2, 1, 9, 8)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lengths": torch.ones(2)}, TypeError, "lengths must be int32 or int64, got float32"),
    ({"lengths": torch.tensor([1])}, ValueError, "lengths must have the shape [2], got [1]"),
    (
        {"lengths": torch.tensor([1, 10])},
        ValueError,
        "lengths must be from 0 to the 9 keys of the cache, got [1, 10]",
    ),
    ({"window": 0}, ValueError, "window must be at least 1, the key itself, got 0"),
    ({"sinks": torch.ones(2)}, ValueError, "sinks must have the shape [4], got [2]"),
    (
        {"k_scale": torch.ones(2)},
        ValueError,
        "k_scale is for caches of 8 bits, got one of float32",
    ),
    ({"softcap": -1.0}, ValueError, "softcap must be greater than 0, got -1.0"),
]


@pytest.mark.parametrize(("others", "kind", "message"), BAD, ids=[b[2] for b in BAD])
def test_bad_input_is_named(others: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        metalcore.attention_decode(q, k, v, **others)
    assert str(caught.value) == f"attention_decode: {message}"


def test_a_gradient_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match="attention_decode: has no gradient"):
        metalcore.attention_decode(q.clone().requires_grad_(), k, v)
