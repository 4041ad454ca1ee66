# SPDX-License-Identifier: MIT
"""Preference losses of a linear layer: DPO and ORPO, from log probabilities of whole sequences.

Tokens are taken a chunk at a time, as for `linear_cross_entropy`, whose losses per token these are
made of: the logits of all tokens are never held, and are computed again in the backward pass.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore._accuracy import set_accuracy
from metalcore._check import (
    expect,
    expect_tensors,
    refuse,
    shape,
)
from metalcore.ops.train.linear_cross_entropy import linear_cross_entropy

# losses of single tokens are rounded, then added up and passed through a sigmoid
set_accuracy("linear_preference", 16.0)


def linear_dpo(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    softcap: float | None = None,
) -> Tensor:
    """Direct preference optimisation of `hidden @ weight.T + bias`.

        -log sigmoid(beta * (log p(chosen) / p(rejected) - log r(chosen) / r(rejected)))

    Args:
        hidden: [2 B, T, H], the chosen sequences first, then the rejected ones in the same order.
        weight, bias: [C, H] and [C].
        target: the next token of each, int64, [2 B, T].
        ref_hidden, ref_weight, ref_bias: the same of the reference model, which gets no gradient;
            without `ref_hidden`, r is left out.
        beta: how far the policy may go from the reference.
        label_smoothing: probability that a preference is the wrong way round.
        ignore_index: targets that count for nothing.
        softcap: as for `cross_entropy`.

    Returns:
        The mean over the B pairs, a scalar. Kept in float32 (float64 for float64).

    Example:
        >>> loss = metalcore.linear_dpo(
        ...     hidden, head.weight, labels, ref_hidden=ref_hidden, ref_weight=ref_head.weight
        ... )
    """
    op = "linear_dpo"
    expect(
        (ref_hidden is None) == (ref_weight is None), op, "ref_hidden and ref_weight come together"
    )
    log_p = _log_probabilities(op, hidden, weight, target, bias, ignore_index, softcap).sum(-1)
    margin = _difference(log_p)
    if ref_hidden is not None and ref_weight is not None:
        with torch.no_grad():
            log_r = _log_probabilities(
                op, ref_hidden, ref_weight, target, ref_bias, ignore_index, softcap
            )
        margin = margin - _difference(log_r.sum(-1))
    wins, loses = F.logsigmoid(beta * margin), F.logsigmoid(-beta * margin)
    return -((1 - label_smoothing) * wins + label_smoothing * loses).mean()


def linear_orpo(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    beta: float = 0.1,
    ignore_index: int = -100,
    softcap: float | None = None,
) -> Tensor:
    """Odds ratio preference optimisation of `hidden @ weight.T + bias`.

        cross_entropy(chosen) - beta * log sigmoid(log odds(chosen) / odds(rejected))

    where odds are those of the geometric mean of a sequence's probabilities.

    Args:
        hidden: [2 B, T, H], the chosen sequences first, then the rejected ones in the same order.
        weight, bias: [C, H] and [C].
        target: the next token of each, int64, [2 B, T].
        beta: what the preference counts, against the likelihood of the chosen sequences.
        ignore_index: targets that count for nothing.
        softcap: as for `cross_entropy`.

    Returns:
        The mean over tokens and over pairs, a scalar. Kept in float32 (float64 for float64).

    Example:
        >>> loss = metalcore.linear_orpo(hidden, head.weight, labels, beta=0.1)
    """
    log_p = _log_probabilities("linear_orpo", hidden, weight, target, bias, ignore_index, softcap)
    counts = (target != ignore_index).sum(-1)
    mean = log_p.sum(-1) / counts
    log_odds = _difference(mean - torch.log(-torch.expm1(mean)))
    pairs = log_p.shape[0] // 2
    likelihood = -log_p[:pairs].sum() / counts[:pairs].sum()
    return likelihood - beta * F.logsigmoid(log_odds).mean()


def _log_probabilities(
    op: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    softcap: float | None,
) -> Tensor:
    """log p of each target, [2 B, T]; 0 where it is ignored."""
    expect_tensors(op, hidden=hidden, weight=weight, target=target)
    if not (hidden.dim() == 3 and hidden.shape[0] % 2 == 0):
        refuse(
            op, f"hidden must be [2 B, T, H], chosen and rejected sequences; got {shape(hidden)}"
        )
    losses = linear_cross_entropy(
        hidden, weight, target, bias, ignore_index=ignore_index, reduction="none", softcap=softcap
    )
    # sums of half precision losses are kept in float32
    return -losses if losses.dtype == torch.float64 else -losses.float()


def _difference(chosen_and_rejected: Tensor) -> Tensor:
    chosen, rejected = chosen_and_rejected.chunk(2)
    return chosen - rejected
