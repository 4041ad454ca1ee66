# SPDX-License-Identifier: MIT
"""FlexAttention by ours: torch's results, gradients that torch has not, and what is refused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as theirs

import metalcore
from metalcore._accuracy import error, tolerance

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")

OP, T, H = "flex_attention", 20, 4
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
DOCUMENTS = torch.tensor([0] * 7 + [1] * 6 + [2] * 7)
TABLE = torch.randn(H, T, T)
MASKS: dict[str, Callable[..., Tensor]] = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k < 5),
    "both sides": lambda b, h, q, k: (q - k).abs() <= 3,
    "documents": lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k),
    "heads": lambda b, h, q, k: (q >= k) | (h == 1),
}
MODS: dict[str, Callable[..., Tensor]] = {
    "none": lambda s, b, h, q, k: s,
    "causal": lambda s, b, h, q, k: torch.where(q >= k, s, -torch.inf),
    "soft cap": lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0),
    "alibi": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
    "alibi, signed": lambda s, b, h, q, k: torch.where(q >= k, s + SLOPES[h] * (k - q), -torch.inf),
    "table": lambda s, b, h, q, k: s + TABLE[h, q, k],
}
# what is known to be an argument, in place of a mask tensor
ARGUMENTS = {"causal", "window", "both sides", "none", "soft cap", "alibi"}


def inputs() -> list[Tensor]:
    return [torch.randn(2, n, T, 16) for n in (H, 2, 2)]


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, mask in MASKS.items():
        heads = H if name == "heads" else None
        yield name, {"block_mask": create_block_mask(mask, None, heads, T, T, device="cpu")}
    for name, mod in MODS.items():
        yield name, {"score_mod": mod}
    both = create_block_mask(MASKS["window"], None, None, T, T, device="cpu")
    yield "soft cap", {"score_mod": MODS["soft cap"], "block_mask": both}


def test_results_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    from metalcore.ops.attention import flex_attention as module

    masks: list[Tensor | None] = []
    original = module.attention

    def attention(*args: Any, mask: Tensor | None, **named: Any) -> Any:
        masks.append(mask)
        return original(*args, mask=mask, **named)

    monkeypatch.setattr(module, "attention", attention)
    q, k, v = inputs()
    for name, how in cases():
        wanted = AuxRequest(lse=True)
        truth, aux = theirs(q, k, v, enable_gqa=True, return_aux=wanted, **how)
        found, ours = metalcore.attn.flex_attention(
            q, k, v, enable_gqa=True, return_lse=True, **how
        )
        allowed = tolerance(OP, torch.float32, 16 + T)
        assert error(found, truth) <= allowed, name
        assert error(ours, aux.lse) <= allowed, name
        assert (masks.pop() is None) is (
            name in ARGUMENTS and (name, *how) != ("causal", "score_mod")
        )


def test_gradients_of_masks_and_scores() -> None:
    q, k, v = (x.double().requires_grad_() for x in inputs())
    table = TABLE.double().requires_grad_()

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + table[h, i, j]

    mask = create_block_mask(MASKS["causal"], None, None, T, T, device="cpu")
    y = metalcore.attn.flex_attention(q, k, v, mod, mask, enable_gqa=True)
    visible = torch.ones(T, T, dtype=torch.bool).tril()
    scores = q @ k.repeat_interleave(2, 1).mT / 4 + table
    p = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    truth = p @ v.repeat_interleave(2, 1)
    leaves = (q, k, v, table)
    grads = [torch.autograd.grad(x.square().sum(), leaves) for x in (y, truth)]
    for found, expected in zip(*grads, strict=True):
        assert error(found, expected) <= tolerance(OP, torch.float64, T * T)


def test_more_keys_than_queries() -> None:
    q, k, v = inputs()
    mask = create_block_mask(MASKS["window"], None, None, 7, T, device="cpu")
    mod = MODS["alibi"]
    truth = theirs(q[:, :, :7], k, v, mod, mask, enable_gqa=True)
    found = metalcore.attn.flex_attention(q[:, :, :7], k, v, mod, mask, enable_gqa=True)
    assert error(found, truth) <= tolerance(OP, torch.float32, 16 + T)


def test_what_is_refused() -> None:
    q, k, v = inputs()
    flex = metalcore.attn.flex_attention
    with pytest.raises(ValueError, match="flex_attention: score_mod must hide scores, add to"):
        flex(q, k, v, lambda s, b, h, i, j: s * s, enable_gqa=True)
    with pytest.raises(ValueError, match="4 heads over 2 need enable_gqa=True"):
        flex(q, k, v)
    mask = create_block_mask(MASKS["causal"], None, None, 7, 7, device="cpu")
    with pytest.raises(ValueError, match="block_mask must be for the lengths of query and key"):
        flex(q, k, v, block_mask=mask, enable_gqa=True)
