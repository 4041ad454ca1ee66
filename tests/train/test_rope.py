# SPDX-License-Identifier: MIT
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore._op import Op
from tests.backends import Backend
from tests.check import check_op, check_registration
from tests.strategies import layouts

B, S, H, KV = 2, 5, 3, 2

Case = tuple[int, int, int, int, bool, bool, str]

CASES: list[Case] = [
    # heads_dim, head size, rotary_dim, values per table row, interleaved, inverse, why
    (1, 16, 16, 16, False, False, "llama"),
    (2, 16, 16, 8, False, True, "heads after positions, half tables, turned back"),
    (1, 40, 24, 24, False, True, "a part of the head"),
    (1, 42, 22, 11, False, False, "odd half"),
    (1, 16, 16, 16, True, True, "neighbours, turned back"),
    (2, 40, 24, 12, True, False, "neighbours of a part, half tables"),
    (1, 10, 6, 6, True, False, "neighbours that end inside a register"),
    (2, 10, 6, 3, True, True, "neighbours, half tables, odd"),
]


def _tables(backend: Backend, dtype: torch.dtype, *size: int) -> tuple[Tensor, Tensor]:
    return backend.randn(*size, dtype=dtype), backend.randn(*size, dtype=dtype)


def _heads(backend: Backend, heads: int, dim: int, size: int, dtype: torch.dtype) -> Tensor:
    shape = (B, heads, S, size) if dim == 1 else (B, S, heads, size)
    return backend.randn(*shape, dtype=dtype)


@pytest.mark.parametrize("case", CASES, ids=[c[-1] for c in CASES])
def test_matches_reference(
    backend: Backend, case: tuple[int, int, int, int, bool, bool, str]
) -> None:
    dim, size, rotary, row, interleaved, inverse, _ = case
    for dtype in backend.dtypes:
        q, k = _heads(backend, H, dim, size, dtype), _heads(backend, KV, dim, size, dtype)
        how = (dim, rotary, interleaved, inverse)
        cos, sin = _tables(backend, dtype, S, row)
        # the gradients of the tables add up all heads
        check_op(backend, "rope", (q, k, cos, sin, None, *how), reduces_over=B * (H + KV))
        cos, sin = _tables(backend, torch.float32, B, S, row)
        check_op(backend, "rope", (q, None, cos, sin, None, *how), reduces_over=H)
        positions = torch.randint(0, 9, (B, S), device=backend.device)
        cos, sin = _tables(backend, dtype, 9, row)
        args = (q, k, cos, sin, positions, *how)
        check_op(backend, "rope", args, reduces_over=2, differentiable=False)


@given(st.data(), st.sampled_from([1, 2]), st.sampled_from([16, 22]), st.booleans())
def test_any_layout_gives_the_same(
    data: st.DataObject, dim: int, size: int, interleaved: bool
) -> None:
    q, k = torch.randn(2, 3, 4, size), torch.randn(2, *((5, 4) if dim == 1 else (3, 5)), size)
    cos, sin = torch.randn(q.shape[3 - dim], size), torch.randn(q.shape[3 - dim], size)
    args = (cos, sin, None, dim, size, interleaved, False)
    expected = Op.all["rope"](q, k, *args)
    views = data.draw(layouts(q)), data.draw(layouts(k))
    for found, truth in zip(Op.all["rope"](*views, *args), expected, strict=True):
        assert torch.equal(found, truth)


def test_views_of_a_projection_are_not_copied(backend: Backend) -> None:
    qkv = backend.randn(2, 7, (4 + 2 + 2) * 8)
    q = qkv[..., :32].view(2, 7, 4, 8).transpose(1, 2)
    k = qkv[..., 32:48].view(2, 7, 2, 8).transpose(1, 2)
    cos, sin = backend.randn(2, 7, 8), backend.randn(2, 7, 8)
    a, b = metalcore.apply_rotary_pos_emb(q, k, cos, sin)
    expected = metalcore.apply_rotary_pos_emb(q.contiguous(), k.contiguous(), cos, sin)
    assert torch.equal(a, expected[0])
    assert torch.equal(b, expected[1])
    assert a.transpose(1, 2).is_contiguous()
    assert expected[0].is_contiguous()


def test_outputs_past_the_caches_are_written_whole() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, cos, sin = torch.randn(1, 33, 700, 96), torch.randn(700, 32), torch.randn(700, 32)
        with metalcore.trace() as t:
            y = metalcore.apply_rotary_pos_emb_single(q.to(dtype), cos, sin, rotary_dim=64)
        truth = Op.all["rope"].meaning(
            q.to(dtype).double(), None, cos, sin, None, 1, 64, False, False
        )[0]
        assert error(y, truth) <= tolerance("rope", dtype, 2)
        assert t.records[0].variant == "positions_streamed"


def test_equals_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16)
    cos, sin = metalcore.RotaryEmbedding(16)(q, torch.arange(9)[None] + 3)
    expected = llama.apply_rotary_pos_emb(q, k, cos, sin)
    found = metalcore.apply_rotary_pos_emb(q, k, cos, sin)
    torch.testing.assert_close(found, expected)
    after = [x.transpose(1, 2).contiguous() for x in (q, k)]
    found = metalcore.apply_rotary_pos_emb(*after, cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close([x.transpose(1, 2) for x in found], list(expected))


def test_position_ids_pick_rows(backend: Backend) -> None:
    q, k = backend.randn(2, 3, 4, 8), backend.randn(2, 1, 4, 8)
    cos, sin = backend.randn(20, 8), backend.randn(20, 8)
    for ids in (torch.tensor([3, 0, 19, 3]), torch.tensor([[5, 6, 7, 8], [1, 1, 0, 2]])):
        ids = ids.to(backend.device)
        found = metalcore.apply_rotary_pos_emb(q, k, cos, sin, ids)
        expected = metalcore.apply_rotary_pos_emb(q, k, cos[ids], sin[ids])
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


def test_positions_that_are_not_there(backend: Backend) -> None:
    q, cos, ids = backend.randn(1, 2, 2, 8), backend.randn(4, 8), torch.tensor([4, 1])
    if backend.name == "cpu":
        for bad in (4, -1):
            ids[0] = bad
            with pytest.raises(IndexError, match=f"from 0 to 3, .* got {bad}"):
                metalcore.apply_rotary_pos_emb_single(q, cos, cos, ids)
    else:
        y = metalcore.apply_rotary_pos_emb_single(q, cos, cos, ids.to(backend.device))
        assert y[:, :, 0].isnan().all()
        assert y[:, :, 1].isfinite().all()


def test_any_number_of_leading_dimensions(backend: Backend) -> None:
    q, k = backend.randn(2, 3, 4, 5, 8), backend.randn(2, 3, 1, 5, 8)
    cos, sin = backend.randn(2, 3, 5, 8), backend.randn(2, 3, 5, 8)
    a, b = metalcore.apply_rotary_pos_emb(q, k, cos, sin)
    for i in range(2):
        for j in range(3):
            one = metalcore.apply_rotary_pos_emb(q[i, j], k[i, j], cos[i, j], sin[i, j])
            assert torch.equal(one[0], a[i, j])
            assert torch.equal(one[1], b[i, j])


def test_the_gradient_turns_back(backend: Backend) -> None:
    x = backend.randn(1, 2, 3, 8).requires_grad_()
    cos, sin = metalcore.RotaryEmbedding(8)(x, torch.arange(3, device=x.device))
    y = metalcore.apply_rotary_pos_emb_single(x, cos, sin)
    (dx,) = torch.autograd.grad(y, x, y.detach())
    assert error(dx, x.double()) <= tolerance("rope", torch.float32, 2)


def test_a_loss_of_only_one_of_them(backend: Backend) -> None:
    q, k = backend.randn(1, 2, 3, 8).requires_grad_(), backend.randn(1, 1, 3, 8).requires_grad_()
    cos, sin = backend.randn(3, 8), backend.randn(3, 8)
    a, _ = metalcore.apply_rotary_pos_emb(q, k, cos, sin)
    dq, dk = torch.autograd.grad(a.sum(), (q, k), allow_unused=True)
    assert dq is not None
    assert dk is None


@pytest.mark.parametrize("size", [(0, 2, 3, 8), (1, 0, 3, 8), (1, 2, 0, 8)])
def test_empty(backend: Backend, size: tuple[int, ...]) -> None:
    q, k = backend.randn(*size).requires_grad_(), backend.randn(size[0], 2, *size[2:])
    cos, sin = backend.randn(size[2], 8), backend.randn(size[2], 8)
    a, b = metalcore.apply_rotary_pos_emb(q, k, cos, sin)
    a.sum().backward()
    assert a.shape == q.shape
    assert b.shape == k.shape


def test_a_nan_stays_a_nan(backend: Backend) -> None:
    # all ones: rounding to bfloat16 must not carry into the sign
    nan = torch.full((3, 8), -1, dtype=torch.int32).view(torch.float32).to(backend.device)
    x = backend.randn(1, 2, 3, 8, dtype=torch.bfloat16)
    assert metalcore.apply_rotary_pos_emb_single(x, nan, nan).isnan().all()
    x[0, 0, 0, 0] = float("nan")
    y = metalcore.apply_rotary_pos_emb_single(x, torch.ones_like(nan), torch.ones_like(nan))
    assert y.isnan().sum() == 2


def test_derivatives_and_registration() -> None:
    q, k, table = torch.randn(1, 2, 2, 5), torch.randn(1, 1, 2, 5), torch.randn(2, 4)
    check_registration("rope", (q, k, table, table + 1, None, 1, 4, False, False))
    ids = torch.tensor([1, 1])
    check_registration("rope", (q.transpose(1, 2), None, table, table, ids, 2, 4, True, True))


def test_compiles_without_graph_breaks(device: Backend) -> None:
    rope = metalcore.RotaryEmbedding(8)

    def rotated(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return metalcore.apply_rotary_pos_emb(q, k, *rope(q, seq_len=q.shape[2]))

    q, k = device.randn(2, 4, 3, 8).requires_grad_(), device.randn(2, 1, 3, 8)
    compiled = torch.compile(rotated, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k), rotated(q, k))
    (dq,) = torch.autograd.grad(compiled(q, k)[0].square().sum(), q)
    (expected,) = torch.autograd.grad(rotated(q, k)[0].square().sum(), q)
    torch.testing.assert_close(dq, expected)


def test_function_transforms(backend: Backend) -> None:
    q, k = backend.randn(3, 2, 4, 5, 8), backend.randn(3, 2, 1, 5, 8)
    cos, sin = backend.randn(5, 8), backend.randn(5, 8)

    def rotated(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return metalcore.apply_rotary_pos_emb(q, k, cos, sin)

    mapped = torch.func.vmap(rotated)(q, k)
    for i in range(3):
        for a, b in zip(mapped, rotated(q[i], k[i]), strict=True):
            assert torch.equal(a[i], b)


def test_autocast_keeps_the_dtype_of_the_input() -> None:
    q, k = torch.randn(1, 2, 3, 8).bfloat16(), torch.randn(1, 1, 3, 8).bfloat16()
    cos, sin = metalcore.RotaryEmbedding(8)(q, torch.arange(3))
    with torch.autocast("cpu", torch.bfloat16):
        a, b = metalcore.apply_rotary_pos_emb(q, k, cos, sin)
    assert a.dtype == b.dtype == torch.bfloat16


def test_module_follows_the_seeds_and_transformers() -> None:
    rope = metalcore.RotaryEmbedding(dim=16, max_position_embeddings=32)
    cos, sin = rope(seq_len=7)
    assert cos.shape == sin.shape == (7, 16)
    assert rope.state_dict() == {}
    x, ids = torch.randn(2, 7, 4).bfloat16(), torch.arange(14).view(2, 7)
    half_cos, half_sin = rope.bfloat16()(x, ids)
    assert half_cos.dtype == torch.bfloat16
    torch.testing.assert_close(half_cos[0], cos.bfloat16())
    torch.testing.assert_close(half_sin[0], sin.bfloat16())
    assert str(rope) == "RotaryEmbedding(16, base=10000.0, interleaved=False)"
    pairs, _ = metalcore.RotaryEmbedding(16, interleaved=True)(seq_len=7)
    assert torch.equal(pairs[:, ::2], cos[:, :8])
    assert metalcore.rope_forward is metalcore.apply_rotary_pos_emb


q8, k8, t8 = torch.randn(2, 4, 3, 8), torch.randn(2, 1, 3, 8), torch.randn(3, 8)
BAD = [
    (
        lambda: metalcore.apply_rotary_pos_emb(q8, k8, t8[:2], t8[:2]),
        ValueError,
        "cos and sin must have a row for each of the 3 positions of q [2, 4, 3, 8], got [2, 8]",
    ),
    (
        lambda: metalcore.apply_rotary_pos_emb(q8, k8, t8[:, :6], t8[:, :6]),
        ValueError,
        "cos and sin must both be [..., S, 8] or [..., S, 4]; got [3, 6] and [3, 6]; "
        "pass rotary_dim if fewer values are rotated",
    ),
    (
        lambda: metalcore.apply_rotary_pos_emb(q8, k8[:1], t8, t8),
        ValueError,
        "k must have the shape of q but for the heads; got q [2, 4, 3, 8] and k [1, 1, 3, 8]",
    ),
    (
        lambda: metalcore.apply_rotary_pos_emb(q8, k8, t8, t8, rotary_dim=5),
        ValueError,
        "rotary_dim must be even and at most the head size 8, got 5",
    ),
    (
        lambda: metalcore.apply_rotary_pos_emb(q8, k8, t8, t8, torch.tensor([0, 1])),
        ValueError,
        "position_ids must be [3] or [2, 3] and pick rows of cos and sin [positions, ...]; "
        "got position_ids [2] and cos [3, 8]",
    ),
    (
        lambda: metalcore.apply_rotary_pos_emb(q8, k8, t8, t8, torch.tensor([0.0, 1, 2])),
        TypeError,
        "position_ids must be int64, got float32; convert with .long()",
    ),
    (
        lambda: metalcore.apply_rotary_pos_emb(q8, k8, t8, t8, unsqueeze_dim=3),
        ValueError,
        "unsqueeze_dim must be 1 or 2, got 3",
    ),
    (
        lambda: metalcore.apply_rotary_pos_emb(q8, k8.half(), t8, t8),
        TypeError,
        "all of these must have one dtype, got q float32 and k float16; convert with .to()",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == f"apply_rotary_pos_emb: {message}"
