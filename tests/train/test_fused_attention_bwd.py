# SPDX-License-Identifier: MIT
"""The gradients of what comes before attention, against autograd in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend

OP = "fused_attention_bwd"
B, S, HIDDEN, D, RANK, SCALE, EPS = 2, 5, 12, 8, 3, 0.5, 1e-6
HEADS = (4, 2, 2)


def _inputs(backend: Backend, dtype: torch.dtype) -> list[Tensor]:
    """hidden_states, W of q, k, v, A and B of each, and the norm's weight."""
    wide = [heads * D for heads in HEADS]
    adapters = [size for n in wide for size in ((RANK, HIDDEN), (n, RANK))]
    sizes = ((B, S, HIDDEN), *((n, HIDDEN) for n in wide), *adapters, (HIDDEN,))
    return [(backend.randn(*s) * s[-1] ** -0.5).to(dtype) for s in sizes]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None, : D // 2], sin[:, None, : D // 2]  # [S, 1, D / 2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _norm(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return (x * rstd if weight is None else x * rstd * weight), rstd


def _forward(leaves: list[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """q, k and v [B, S, heads, D] as attention gets them."""
    x, Wq, Wk, Wv, *adapters, weight = leaves
    n, _ = _norm(x, weight)
    out = []
    for i, W in enumerate((Wq, Wk, Wv)):
        A, low = adapters[2 * i : 2 * i + 2]
        y = (n @ W.T + SCALE * n @ A.T @ low.T).view(B, S, -1, D)
        out.append(y if i == 2 else _rotate(y, cos, sin))
    return out


@pytest.mark.parametrize("half_tables", [False, True], ids=["cos of D", "cos of D/2"])
def test_equals_autograd(backend: Backend, half_tables: bool) -> None:
    cos, sin = metalcore.RotaryEmbedding(D)(seq_len=S)
    for dtype in backend.dtypes:
        leaves = _inputs(backend, dtype)
        doubles = [t.cpu().double().requires_grad_() for t in leaves]
        outputs = _forward(doubles, cos.double(), sin.double())
        grads = [torch.randn_like(y).to(dtype) for y in outputs]
        truth = torch.autograd.grad(outputs, doubles, [g.double() for g in grads])
        x, *weights, weight = leaves
        n, rstd = _norm(doubles[0], doubles[-1])
        tables = [(t[:, : D // 2] if half_tables else t).to(x.device) for t in (cos, sin)]
        found = metalcore.fused_attention_bwd(
            *(g.to(x.device) for g in grads),
            *(t.contiguous() for t in tables),
            n.detach().to(x.device, dtype),
            *weights,
            SCALE,
            x,
            weight,
            rstd.detach().to(x.device, torch.promote_types(dtype, torch.float32)),
        )
        for a, b in zip(found, truth, strict=True):
            assert a is not None
            assert a.dtype == dtype
            off, allowed = error(a, b), tolerance(OP, dtype, HIDDEN * sum(HEADS))
            assert off <= allowed, f"error {off:.3g} is over {allowed:.3g}"


def _call(backend: Backend, **changes: Any) -> Any:
    """Without adapters and without a norm's weight."""
    x, Wq, Wk, Wv, *_ = _inputs(backend, torch.float32)
    n, rstd = _norm(x, None)
    cos, sin = (t.to(x.device) for t in metalcore.RotaryEmbedding(D)(seq_len=S))
    d_q, d_k, d_v = (backend.randn(B, S, heads, D) for heads in HEADS)
    values: dict[str, Any] = {"d_q": d_q, "d_k": d_k, "d_v": d_v, "cos": cos, "sin": sin}
    values |= {"x_norm": n, "W_q": Wq, "W_k": Wk, "W_v": Wv, "scale": 1.0}
    values |= {"hidden_states": x, "rms_weight": None, "rstd": rstd}
    values |= {f"{matrix}_{c}": None for matrix in "AB" for c in "qkv"}
    return metalcore.fused_attention_bwd(**values | changes)


def test_what_is_not_there_gets_none(backend: Backend) -> None:
    with metalcore.trace() as t:
        found = _call(backend)
    assert [g is None for g in found] == [False] * 4 + [True] * 7
    assert t.paths.keys() == {"rope", "rms_norm_backward"}
    assert {path.split(":")[0] for paths in t.paths.values() for path in paths} == {backend.path}
    frozen = _call(backend, weight_grads=False)
    assert [g is None for g in frozen] == [False] + [True] * 10


BAD = [
    (
        {"d_k": torch.randn(B, S + 1, 2, D)},
        "d_k must be [B, S, heads, D], with the B and S of hidden_states and one D; got d_k "
        "[2, 6, 2, 8] and hidden_states [2, 5, 12]",
    ),
    ({"W_q": torch.randn(32, 11)}, "W_q must have the shape [32, 12], got [32, 11]"),
    ({"A_v": torch.randn(3, 12)}, "A_v and B_v come together; pass both or neither"),
    ({"hidden_states": torch.randn(5, 12)}, "hidden_states must be [B, S, H], got [5, 12]"),
    (
        {"cos": torch.randn(5, 3), "sin": torch.randn(5, 3)},
        "cos and sin must both be [..., S, 8] or [..., S, 4]; got [5, 3] and [5, 3]; pass "
        "rotary_dim if fewer values are rotated",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[b[1][:40] for b in BAD])
def test_bad_input_is_named(changes: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match="fused_attention_bwd: ") as caught:
        _call(Backend("cpu"), **changes)
    assert str(caught.value) == f"fused_attention_bwd: {message}"
