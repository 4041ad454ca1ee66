# SPDX-License-Identifier: MIT
"""Functions of tensors whose arguments MLX has in another way than torch: in MLX's order."""

from torch import Tensor

from metalcore._check import expect
from metalcore.ops.attention.attention import attention
from metalcore.ops.train import layer_norm as _layer_norm


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Layer normalisation over the last axis, as `mx.fast.layer_norm`.

    Args:
        x: [..., n], float32, float64, float16 or bfloat16.
        weight: scale, [n]; None for no scale.
        bias: [n]; None for none.
        eps: added to the variance.

    Returns:
        [..., n], in the dtype of `x`. Sums are kept in float32 (float64 for float64).
    """
    return _layer_norm.layer_norm(x, x.shape[-1:], weight, bias, eps)


def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | str | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention, as `mx.fast.scaled_dot_product_attention`, with its gradient in the memory of one
    row per query.

    Args:
        q: [B, heads, T, D].
        k: [B, heads of k, S, D]; each serves as many heads of q.
        v: [B, heads of k, S, Dv].
        scale: of the scores; default 1 / sqrt(D).
        mask: "causal", or an array that is broadcast to [B, heads, T, S]: of bool, True where a
            query sees a key, or of numbers that are added to the scores.
        sinks: [heads], one more score per head that only adds to the sum.

    Returns:
        [B, heads, T, Dv].
    """
    if isinstance(mask, str):
        message = f'mask must be "causal" or an array, got "{mask}"'
        expect(mask == "causal", "scaled_dot_product_attention", message)
        return attention(q, k, v, causal=True, sinks=sinks, scale=scale)
    return attention(q, k, v, mask=mask, sinks=sinks, scale=scale)
