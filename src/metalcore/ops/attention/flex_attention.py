# SPDX-License-Identifier: MIT
"""FlexAttention with gradients on every device: a BlockMask, and the score_mods that kernels know.

What a function of indices computes is found out by asking it, for all indices, once: whether it
hides keys by their distance, caps scores, or adds to them. So it must not change what it computes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from metalcore._check import refuse
from metalcore.ops.attention.attention import attention

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Sizes = tuple[int, int, int, int]

_OP = "flex_attention"


class _Band(NamedTuple):
    """A query sees keys whose index is by `least` to `most` more than its own, None for any."""

    least: int | None
    most: int | None


class _Score(NamedTuple):
    """What a score_mod does: hide, cap, take slopes times distances off, or add something."""

    visible: Tensor | None = None
    softcap: float | None = None
    slopes: Tensor | None = None
    bias: Tensor | None = None


_bands: "WeakKeyDictionary[BlockMask, dict[Sizes, _Band | Tensor]]" = WeakKeyDictionary()
_scores: "WeakKeyDictionary[Any, dict[tuple[Any, ...], _Score]]" = WeakKeyDictionary()


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch.nn.attention.flex_attention.flex_attention` by `attention`, with gradients.

    Causal and sliding masks become arguments that skip what nobody sees, and so do soft caps and
    ALiBi; other masks and everything that is added to scores become a mask tensor. A score_mod that
    does more to a score is refused.

    Args:
        query, key, value: [B, H, Tq, D], [B, Hk, Tk, D] and [B, Hk, Tk, Dv].
        score_mod: f(score, b, h, q_idx, kv_idx), which torch can compute for tensors of indices. It
            is asked once for each size: what it captures must not change, but may have gradients.
        block_mask: of `create_block_mask`, for these lengths.
        scale: of the products, D^-0.5 if it is None.
        enable_gqa: key and value may have fewer heads than query.
        return_lse: also return the logarithm of the softmax's denominator.

    Returns:
        [B, H, Tq, Dv]; with `return_lse` also [B, H, Tq].

    Example:
        >>> mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512, device="cpu")
        >>> y = metalcore.attn.flex_attention(q, k, v, block_mask=mask)
    """
    if query.dim() != 4 or key.dim() != 4:
        refuse(
            _OP, f"query and key must be [B, H, T, D], got {query.dim()} and {key.dim()} dimensions"
        )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        refuse(_OP, f"{query.shape[1]} heads over {key.shape[1]} need enable_gqa=True")
    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    band = _Band(None, None)
    masks: list[Tensor] = []
    if block_mask is not None:
        found = _of_mask(block_mask, sizes)
        band, masks = (found, []) if isinstance(found, _Band) else (band, [found])
    score = _Score() if score_mod is None else _of_score(score_mod, sizes, query)
    if score.visible is not None:
        masks.append(score.visible)
    window = _as_window(band, sizes)
    if window is None:
        masks.append(_visible(band, sizes, query.device))
    mask: Tensor | None = None
    for visible in masks:
        mask = visible if mask is None else mask & visible
    if score.bias is not None:
        mask = score.bias if mask is None else score.bias.masked_fill(~mask, -torch.inf)
    run = partial(attention, window=window, softcap=score.softcap, alibi_slopes=score.slopes)
    return run(query, key, value, mask=mask, scale=scale, return_lse=return_lse)


def _distance(sizes: Sizes, device: torch.device) -> Tensor:
    return torch.arange(sizes[3], device=device) - torch.arange(sizes[2], device=device)[:, None]


def _visible(band: _Band, sizes: Sizes, device: torch.device) -> Tensor:
    distance = _distance(sizes, device)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if band.least is not None:
        visible = visible & (distance >= band.least)
    return visible if band.most is None else visible & (distance <= band.most)


def _as_window(band: _Band, sizes: Sizes) -> tuple[int, int] | None:
    """As `attention` takes it, whose last query stands at the last key; None if it cannot."""
    ahead = sizes[3] - sizes[2]
    left = -1 if band.least is None else ahead - band.least
    right = -1 if band.most is None else band.most - ahead
    fits = (band.least is None or left >= 0) and (band.most is None or right >= 0)
    return (left, right) if fits else None


def _of_mask(block_mask: BlockMask, sizes: Sizes) -> _Band | Tensor:
    known = _bands.setdefault(block_mask, {})
    if sizes not in known:
        entries, heads = block_mask.shape[:2]
        if tuple(block_mask.seq_lengths) != sizes[2:]:
            found = f"it is for {tuple(block_mask.seq_lengths)}, these are {sizes[2:]}"
            refuse(_OP, f"block_mask must be for the lengths of query and key; {found}")
        device = block_mask.kv_num_blocks.device
        at = _indices((int(entries), int(heads), *sizes[2:]), device)
        seen = torch.broadcast_to(block_mask.mask_mod(*at), (int(entries), int(heads), *sizes[2:]))
        known[sizes] = _as_band(seen) or seen
    return known[sizes]


def _indices(sizes: Sizes, device: torch.device) -> list[Tensor]:
    """Of entry, head, query and key, each along its own dimension of [B, H, Tq, Tk]."""
    return [
        torch.arange(n, device=device).view([-1 if i == j else 1 for j in range(4)])
        for i, n in enumerate(sizes)
    ]


def _as_band(seen: Tensor) -> _Band | None:
    """The band that a mask [B, H, Tq, Tk] is, if it is one."""
    sizes: Sizes = tuple(seen.shape)  # type: ignore[assignment]
    if sizes[:2] != (1, 1) or not bool(seen.any()):
        return None
    distances = _distance(sizes, seen.device)[seen[0, 0]]
    least, most = int(distances.min()), int(distances.max())
    band = _Band(None if least <= 1 - sizes[2] else least, None if most >= sizes[3] - 1 else most)
    return band if torch.equal(_visible(band, sizes, seen.device), seen[0, 0]) else None


def _of_score(mod: ScoreMod, sizes: Sizes, query: Tensor) -> _Score:
    known = _scores.setdefault(mod, {})
    key = (sizes, query.device)
    if key not in known:
        found = _ask(mod, sizes, query.device)
        if found.bias is not None and found.bias.requires_grad:
            # with the history of each call
            return found
        known[key] = found
    return known[key]


def _ask(mod: ScoreMod, sizes: Sizes, device: torch.device) -> _Score:
    at = _indices(sizes, device)

    def scores(x: float) -> Tensor:
        return mod(torch.full((1, 1, *sizes[2:]), x, device=device), *at)

    zero = scores(0.0)
    seen = zero != -torch.inf
    visible = None if bool(seen.all()) else seen
    added = torch.where(seen, zero, 0)
    with torch.no_grad():
        off = [torch.where(seen, scores(x) - zero - x, 0).abs().max() for x in (1.0, -2.5)]
        is_added = bool(max(off) <= 1e-5 * (1 + added.abs().max()))
        if is_added and not added.requires_grad and not bool(added.any()):
            return _Score(visible)
        if not is_added:
            return _Score(visible, softcap=_as_cap(mod, at, seen, scores(1e6)))
        slopes = None if added.requires_grad else _as_slopes(added, seen, sizes)
    return _Score(visible, slopes=slopes) if slopes is not None else _Score(bias=zero)


def _as_cap(mod: ScoreMod, at: list[Tensor], seen: Tensor, large: Tensor) -> float:
    """c of c * tanh(score / c), which the largest scores are."""
    cap = float(large.expand(seen.shape)[seen][0])
    for x in (-3.0, 0.5, 1.0, 7.0, 40.0):
        score = torch.full_like(seen, x, dtype=torch.float32)
        found = torch.where(seen, mod(score, *at), 0)
        expected = torch.where(seen, cap * torch.tanh(score / cap), 0)
        if not (0 < cap < 1e5) or not bool((found - expected).abs().max() <= 1e-4 * cap):
            refuse(_OP, "score_mod must hide scores, add to them, or cap them by c * tanh(x / c)")
    return cap


def _as_slopes(added: Tensor, seen: Tensor, sizes: Sizes) -> Tensor | None:
    """[H], where -slope * |q_idx - kv_idx| is added."""
    if sizes[2] != sizes[3] or sizes[2] < 2 or added.shape[0] != 1:
        return None
    distance = _distance(sizes, added.device).abs()
    slopes = -added[0, :, 1, 0].expand(sizes[1])
    expected = torch.where(seen, -slopes[:, None, None] * distance, 0)
    is_so = (added - expected).abs().max() <= 1e-6 * distance.max() * slopes.abs().max()
    return slopes.contiguous() if bool(is_so) else None
