# SPDX-License-Identifier: MIT
"""The way back from attention: through rotary positions, the projections to q, k, v and RMSNorm."""

from collections.abc import Sequence

import torch
from torch import Tensor

from metalcore._accuracy import set_accuracy
from metalcore._check import (
    expect_float,
    expect_float_or_none,
    expect_same_device,
    expect_same_dtype,
    expect_shape,
    expect_tensors,
    refuse,
    refuse_tangents,
    shape,
)
from metalcore.ops.train.fused_swiglu_mlp import Grads
from metalcore.ops.train.lora_linear import (
    Projection,
    expect_adapter,
    gradient_of_input,
    gradients_of_weights,
    through_adapter,
    without_empty,
)
from metalcore.ops.train.rms_norm import backward as norm_backward
from metalcore.ops.train.rope import rotate_back

# the rotated gradients and those of the norm's result are rounded on the way
set_accuracy("fused_attention_bwd", 8.0)


def fused_attention_bwd(
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
    cos: Tensor,
    sin: Tensor,
    x_norm: Tensor,
    W_q: Tensor,
    W_k: Tensor,
    W_v: Tensor,
    A_q: Tensor | None,
    B_q: Tensor | None,
    A_k: Tensor | None,
    B_k: Tensor | None,
    A_v: Tensor | None,
    B_v: Tensor | None,
    scale: float,
    hidden_states: Tensor,
    rms_weight: Tensor | None,
    rstd: Tensor,
    *,
    weight_grads: bool = True,
) -> Grads:
    """The gradients of all that comes before attention, for loops that call them by hand:

        q, k, v = rope(p_q(n)), rope(p_k(n)), p_v(n),  n = rms_norm(hidden_states)

    where p(n) = n W^T + scale * n A^T B^T.

    Args:
        d_q, d_k, d_v: gradients that attention leaves, [B, S, heads, D]; k and v may have fewer
            heads than q.
        cos, sin: of the positions, [S, D], [S, D / 2] or with a batch dimension before.
        x_norm: what was projected: the normalised `hidden_states`, [B, S, H].
        W_q, W_k, W_v: [heads * D, H] each.
        A_q, B_q, A_k, B_k, A_v, B_v: adapters as for `lora_linear`; None or empty where there is
            none.
        scale: of the adapters.
        hidden_states: what was normalised, [B, S, H].
        rms_weight: [H], or None.
        rstd: 1 / root mean square of each row of `hidden_states`, [B, S] or [B, S, 1].
        weight_grads: False for frozen W_q, W_k and W_v, which then get None.

    Returns:
        The gradients of hidden_states (without what a residual adds), W_q, W_k, W_v, A_q, B_q, A_k,
        B_k, A_v, B_v and rms_weight; None for what there is not.

    Example:
        >>> d_hidden, dW_q, *rest, d_rms = metalcore.fused_attention_bwd(
        ...     d_q, d_k, d_v, cos, sin, x_norm, W_q, W_k, W_v, *adapters, 1.0, x, weight, rstd
        ... )
    """
    op = "fused_attention_bwd"
    expect_tensors(op, cos=cos, sin=sin, rstd=rstd)
    weights, grads = (W_q, W_k, W_v), (d_q, d_k, d_v)
    pairs = [without_empty(pair) for pair in ((A_q, B_q), (A_k, B_k), (A_v, B_v))]
    _expect(op, grads, weights, pairs, x_norm, hidden_states, rms_weight)
    adapters = (matrix for pair in pairs for matrix in pair)
    refuse_tangents(op, (*grads, *weights, *adapters, x_norm, hidden_states, rms_weight, rstd))
    x, n = (t.detach().reshape(-1, t.shape[-1]) for t in (hidden_states, x_norm))
    with torch.no_grad():
        dq, dk = rotate_back(op, d_q, d_k, cos, sin)
        flat = [d.reshape(len(x), -1) for d in (dq, dk, d_v)]
        projections = [
            Projection(W, A, B, None, float(scale))
            for W, (A, B) in zip(weights, pairs, strict=True)
        ]
        inner = [through_adapter(d, p) for d, p in zip(flat, projections, strict=True)]
        outputs = list(zip(flat, inner, projections, strict=True))
        dn = gradient_of_input(outputs, x.dtype)
        dx, dnorm = norm_backward(
            dn, x, rms_weight, rstd.reshape(-1), 0.0, None, rms_weight is not None
        )
        wanted = (weight_grads, True, True)
        found = [gradients_of_weights(d, i, n, p, wanted) for d, i, p in outputs]
    dweights = [dW for dW, _, _ in found]
    dadapters = [d for _, *pair in found for d in pair]
    dx = dx.view(hidden_states.shape)
    return dx, *dweights, *dadapters, dnorm if rms_weight is not None else None


def _expect(
    op: str,
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    pairs: Sequence[tuple[Tensor | None, Tensor | None]],
    x_norm: Tensor,
    hidden_states: Tensor,
    rms_weight: Tensor | None,
) -> None:
    names = ("q", "k", "v")
    tensors = {f"d_{c}": t for c, t in zip(names, grads, strict=True)}
    tensors |= {f"W_{c}": t for c, t in zip(names, weights, strict=True)}
    tensors |= {"x_norm": x_norm, "hidden_states": hidden_states}
    expect_float(op, **tensors)
    expect_float_or_none(op, rms_weight=rms_weight)
    expect_same_device(op, **tensors, rms_weight=rms_weight)
    expect_same_dtype(op, **tensors)
    if hidden_states.dim() != 3:
        refuse(op, f"hidden_states must be [B, S, H], got {shape(hidden_states)}")
    expect_shape(op, "x_norm", x_norm, hidden_states.shape)
    B, S, H = hidden_states.shape
    expect_shape(op, "rms_weight", rms_weight, (H,))
    for c, d, W, pair in zip(names, grads, weights, pairs, strict=True):
        if not (d.dim() == 4 and d.shape[:2] == (B, S) and d.shape[3] == grads[0].shape[-1]):
            refuse(
                op,
                f"d_{c} must be [B, S, heads, D], with the B and S of hidden_states and one D; got "
                f"d_{c} {shape(d)} and hidden_states {shape(hidden_states)}",
            )
        expect_shape(op, f"W_{c}", W, (d.shape[2] * d.shape[3], H))
        expect_adapter(op, W, *pair, (f"A_{c}", f"B_{c}"))
