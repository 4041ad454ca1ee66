# SPDX-License-Identifier: MIT
"""Masks of transformers as facts: which keys a query sees by its position, and which are padding.

transformers asks the function that goes with an attention for a mask. Ours answers None where its
`sdpa` does, and means the same by it; a mask [B, Tk] of keys that are no padding, to which its
`Seen` is attached, where position says the rest; and the whole mask [B, 1, Tq, Tk] for all others.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils as hf

Function = Callable[..., Any]


class Seen(NamedTuple):
    """Which keys a query sees: by causal order, within a window as `attention` takes it, and
    whether some keys are padding."""

    causal: bool
    window: int | tuple[int, int] | None = None
    is_padded: bool = False


# a mask [B, Tk] has it as an attribute
_SEEN = "metalcore_seen"


def seen_of(mask: Tensor) -> Seen | None:
    """What `make_mask` knows of a mask [B, Tk]; None for one that somebody changed."""
    found: Seen | None = getattr(mask, _SEEN, None)
    return found


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Function = hf.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **how: Any,
) -> Tensor | None:
    """The mask for a layer, as transformers asks for it."""
    # Compilers cannot look into functions, nor are attributes of tensors part of their graphs.
    seen = None if torch.compiler.is_compiling() else _by_position(mask_function)
    # also where the last query does not stand at the last key, as in a static cache
    if (
        seen is None
        or not (allow_is_causal_skip if seen.causal else allow_is_bidirectional_skip)
        or isinstance(q_offset, Tensor)
        or q_offset + q_length != kv_offset + kv_length
        or (attention_mask is not None and attention_mask.shape[-1] < kv_offset + kv_length)
    ):
        mask: Tensor | None = hf.sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset=q_offset,  # type: ignore[arg-type]
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            device=device,
            **how,
        )
        return mask
    keys = attention_mask
    if keys is not None:
        keys = keys[:, kv_offset : kv_offset + kv_length]
        if bool(keys.all()):
            keys = None
    is_within = seen.window is None or _reach(seen.window) >= kv_length
    if keys is None and is_within and (not seen.causal or q_length in (1, kv_length)):
        return None
    seen = seen._replace(is_padded=keys is not None, window=None if is_within else seen.window)
    keys = torch.ones(1, kv_length, dtype=torch.bool, device=device) if keys is None else keys
    setattr(keys, _SEEN, seen)
    return keys


def _reach(window: int | tuple[int, int]) -> int:
    """So many keys are all seen by every query."""
    return window if isinstance(window, int) else min(window) + 1


def _by_position(function: Function) -> Seen | None:
    """What a mask function of transformers says, where it is one of position alone."""
    causal, window = False, None
    for part in _parts(function):
        if part is hf.causal_mask_function:
            causal = True
        elif _is_made_by(hf.sliding_window_overlay, part):
            (window,) = _closure(part)
        elif _is_made_by(hf.sliding_window_bidirectional_overlay, part):
            (distance,) = _closure(part)
            window = (distance, distance)
        elif part is not hf.bidirectional_mask_function:
            return None
    if isinstance(window, int) and not causal:
        return None
    return Seen(causal, window)


def _parts(function: Function) -> Iterator[Function]:
    """The functions of which all must hold."""
    if _is_made_by(hf.and_masks, function):
        for part in _closure(function)[0]:
            yield from _parts(part)
    else:
        yield function


def _is_made_by(maker: Function, function: Function) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code in maker.__code__.co_consts


def _closure(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__]
