# SPDX-License-Identifier: MIT
"""LayerNorm and RMSNorm of each head on its own, with weights for all heads side by side."""

from typing import Literal

from torch import Tensor

from metalcore._check import (
    expect,
    expect_float,
    expect_float_or_none,
    expect_one_of,
    expect_positive,
    expect_same_device,
    expect_shape,
    shape,
)
from metalcore.ops.train.layer_norm import layer_norm
from metalcore.ops.train.rms_norm import rms_norm


def multi_head_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    kind: Literal["layer", "rms"] = "layer",
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    heads_first: bool = False,
) -> Tensor:
    """Normalise each head, then scale and shift by weights that differ from head to head.

    xLSTM has two conventions. The 7B model gives [B, T, H, D] and takes [B, T, H * D], with the
    weight as it is and `eps=1e-6`. The original gives [B, H, T, D] and takes the same
    (`heads_first=True`), with `weight - 1` stored (`weight_offset=1`) and `eps=1e-5`.

    Args:
        x: [B, T, H, D], or with `heads_first` [B, H, T, D].
        weight, bias: [H * D], or None.
        kind: "layer" for mean and variance, "rms" for the mean square alone.
        eps: added to the variance, or to the mean square.
        weight_offset: added to the weight.
        heads_first: whether heads come before time.

    Returns:
        [B, T, H * D], or with `heads_first` [B, H, T, D], in the dtype of `x`. What is normalised
        is rounded to that dtype before it is scaled.

    Example:
        >>> y = metalcore.multi_head_norm(torch.randn(2, 9, 4, 16), torch.ones(64))
    """
    op = "multi_head_norm"
    expect_float(op, x=x)
    expect_float_or_none(op, weight=weight, bias=bias)
    expect_same_device(op, x=x, weight=weight, bias=bias)
    form = "[B, H, T, D]" if heads_first else "[B, T, H, D]"
    expect(x.dim() == 4, op, f"x must be {form}, got {shape(x)}")
    expect_one_of(op, "kind", kind, ("layer", "rms"))
    expect_positive(op, eps=eps)
    heads, size = x.shape[1 if heads_first else 2], x.shape[3]
    expect_shape(op, "weight", weight, (heads * size,))
    expect_shape(op, "bias", bias, (heads * size,))

    y = rms_norm(x, eps=eps) if kind == "rms" else layer_norm(x, (size,), eps=eps)
    each = (heads, 1, size) if heads_first else (heads, size)
    if weight is not None:
        y = y * (weight.view(each) + weight_offset).to(x.dtype)
    if bias is not None:
        y = y + bias.view(each).to(x.dtype)
    return y if heads_first else y.flatten(2)
