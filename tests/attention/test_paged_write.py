# SPDX-License-Identifier: MIT
"""Tokens into pages: each to its slot, and the nearest codes of 8 bits."""

from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore.ops.attention._eight_bit import decoded
from tests.backends import Backend
from tests.check import check_op

SLOTS = torch.tensor([[5, 2, -1, 30], [0, 31, 12, -1]])


def arguments(stored: torch.dtype | None, dtype: torch.dtype, scaled: bool = True) -> list[Any]:
    k, v = torch.randn(2, 3, 4, 40).to(dtype), torch.randn(2, 3, 4, 9).to(dtype)
    caches = [torch.ones(4, 8, 3, n, dtype=stored or dtype) for n in (40, 9)]
    scales = [torch.rand(4, 8, 3) if stored and scaled else None for _ in range(2)]
    return [k, v, *caches, *scales, SLOTS]


@pytest.mark.parametrize("stored", [None, torch.int8, torch.uint8], ids=str)
def test_matches_reference(backend: Backend, stored: torch.dtype | None) -> None:
    for dtype in backend.dtypes:
        for scaled in (True, False):
            if not scaled and (stored == torch.int8 or dtype != torch.float32):
                continue
            args = arguments(stored, dtype, scaled)
            check_op(backend, "paged_write", args, reduces_over=1, differentiable=False)


@pytest.mark.parametrize("form", ["heads", "tokens", "rows"])
def test_each_token_goes_to_its_slot(form: str) -> None:
    k, v, k_cache, v_cache, *_ = arguments(None, torch.float32)
    before = k_cache.clone()
    rows = [x.view(32, *x.shape[2:]) for x in (k_cache, v_cache)]
    tokens = [x.transpose(1, 2).flatten(0, 1) for x in (k, v)]
    if form == "heads":
        metalcore.paged_write(k, v, k_cache, v_cache, SLOTS)
    else:
        to = rows if form == "rows" else (k_cache, v_cache)
        metalcore.paged_write(*tokens, *to, SLOTS.flatten().int())
    for i, slot in enumerate(SLOTS.flatten().tolist()):
        if slot >= 0:
            assert torch.equal(rows[0][slot], tokens[0][i])
            assert torch.equal(rows[1][slot], tokens[1][i])
    others = [n for n in range(32) if n not in SLOTS]
    assert torch.equal(rows[0][others], before.view(32, 3, 40)[others])


def test_every_float8_code_reads_and_writes_as_torch_has_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    between = torch.cat([numbers, (numbers[:-1] + numbers[1:]) / 2, numbers * 1.03, numbers / 3])
    x = between.clamp(-448, 448).view(1, 1, -1)
    cache = torch.zeros(1, 1, 1, x.shape[-1], dtype=torch.float8_e4m3fn)
    metalcore.paged_write(x, x, cache, cache.clone(), torch.tensor([0]))
    found, expected = cache.flatten(), x.flatten().to(torch.float8_e4m3fn)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    # one key, whose value is what comes out
    k = torch.zeros(1, 1, 1, 256)
    y = metalcore.paged_attention(
        *(k, torch.zeros(1, 1, 1, 256, dtype=torch.uint8), codes.view(1, 1, 1, 256)),
        *(torch.tensor([[0]]), torch.tensor([1])),
    )
    torch.testing.assert_close(y.flatten(), numbers, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("stored", [torch.int8, torch.uint8], ids=str)
def test_tokens_that_are_not_finite_read_as_nan_and_zeros_as_zero(stored: torch.dtype) -> None:
    x = torch.tensor([[nan, 1.0], [inf, 1.0], [0.0, 0.0], [-3.0, 1e-3]])[:, None]
    cache, scale = torch.ones(4, 1, 2, dtype=stored), torch.ones(4, 1)
    again = (cache.clone(), scale.clone())
    both = {"k_scale": scale, "v_scale": again[1]}
    metalcore.paged_write(x, x, cache, again[0], torch.arange(4), **both)
    found: Tensor = decoded(cache, scale, torch.float32)[:, 0]
    assert found[:2].isnan().all()
    assert (found[2] == 0).all()
    assert abs(found[3, 0] + 3) < 1e-6


def test_registration() -> None:
    for stored in (None, torch.int8):
        args = tuple(arguments(stored, torch.float32))
        torch.library.opcheck(torch.ops.metalcore_kernels.paged_write.default, args)


k, v, k_cache, v_cache, *_ = arguments(None, torch.float32)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"slots": SLOTS + 1},
        ValueError,
        "slots must be -1 or one of the 32 rows; got 0 to 32",
    ),
    ({"slots": SLOTS.float()}, TypeError, "slots must be int32 or int64, got float32"),
    (
        {"slots": SLOTS[:1]},
        ValueError,
        "k and v must have the same tokens and heads, and each token a slot; "
        "got k [2, 3, 4, 40], v [2, 3, 4, 9] and slots [1, 4]",
    ),
    (
        {"k_cache": k_cache[:, :, :2]},
        ValueError,
        "k_cache must be [pages, page, 3, 40], as k has heads, got [4, 8, 2, 40]",
    ),
    (
        {"k_cache": k_cache.to(torch.int8), "v_cache": v_cache.to(torch.int8)},
        ValueError,
        "k_scale must be given for int8, to write the scale of each token to",
    ),
    ({"k_scale": torch.ones(4, 8, 3)}, ValueError, "k_scale is for caches of 8 bits"),
    (
        {"k": k.half(), "v": v.half()},
        TypeError,
        "the cache must be float16, int8, float8_e4m3fn or uint8; "
        "got k_cache float32 and v_cache float32",
    ),
]


@pytest.mark.parametrize(("others", "kind", "message"), BAD, ids=[b[2] for b in BAD])
def test_bad_input_is_named(others: dict[str, Any], kind: type[Exception], message: str) -> None:
    given = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": SLOTS}
    before = k_cache.clone()
    with pytest.raises(kind) as caught:
        metalcore.paged_write(**(given | others))
    assert str(caught.value) == f"paged_write: {message}"
    assert torch.equal(k_cache, before)
