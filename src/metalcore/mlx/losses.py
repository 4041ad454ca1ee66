# SPDX-License-Identifier: MIT
"""The loss of a language model without its logits, which are never held for all tokens."""

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metalcore._check import refuse
from metalcore.mlx import _table


def default_loss(model: nn.Module, batch: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array]:
    """The loss that mlx-lm trains by, in the memory of a few rows of logits.

    Args:
        model: of mlx-lm, or alike: `model.model` gives hidden states, and `model.lm_head` or
            `model.model.embed_tokens` has the weight of the logits.
        batch: tokens, [B, T].
        lengths: where the tokens that count start and stop, [B, 2].

    Returns:
        The mean loss of the tokens that count, and their number.

    Example:
        >>> mlx_lm.tuner.train(model, optimizer, data, loss=metalcore.mlx.default_loss)
    """
    inputs, targets = batch[:, :-1], batch[:, 1:]
    steps = mx.arange(1, targets.shape[1] + 1)
    mask = (steps >= lengths[:, 0:1]) & (steps <= lengths[:, 1:])
    weight, bias = _head(model)
    hidden = model.model(inputs)
    counted = mx.where(mask, targets, -100).astype(mx.int64)
    total = _linear_cross_entropy()(
        hidden, weight, counted, bias, reduction="sum", dtype=mx.float32
    )
    tokens = mask.sum()
    return total / tokens, tokens


@cache
def _linear_cross_entropy() -> Any:
    return _table.made("linear_cross_entropy")


def _head(model: nn.Module) -> tuple[mx.array, mx.array | None]:
    head = model.get("lm_head", None)
    if isinstance(head, nn.Linear):
        return head.weight, head.get("bias")
    inner = model.get("model", {})
    tied = inner.get("embed_tokens") if head is None else None
    if not isinstance(tied, nn.Embedding):
        refuse(
            "default_loss",
            "the model must have `lm_head`, an mlx.nn.Linear, or `model.embed_tokens`, an "
            f"mlx.nn.Embedding; got {type(head).__name__}",
        )
    return tied.weight, None
