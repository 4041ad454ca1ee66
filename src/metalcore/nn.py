# SPDX-License-Identifier: MIT
"""Modules: thin holders of parameters around the ops, with torch.nn's names and state_dicts."""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from metalcore._check import expect
from metalcore.ops.train.add_rms_norm import fused_add_rmsnorm
from metalcore.ops.train.embedding_bag import embedding_bag
from metalcore.ops.train.gelu import gelu
from metalcore.ops.train.layer_norm import layer_norm
from metalcore.ops.train.rms_norm import rms_norm
from metalcore.ops.train.silu import silu
from metalcore.ops.train.softmax import softmax

if TYPE_CHECKING:
    from metalcore._quantized_layers import (
        GGMLEmbedding as GGMLEmbedding,
    )
    from metalcore._quantized_layers import (
        GGMLLinear as GGMLLinear,
    )
    from metalcore._quantized_layers import (
        Int4Linear as Int4Linear,
    )
    from metalcore._quantized_layers import (
        Int8Linear as Int8Linear,
    )
    from metalcore.xlstm.layers import (
        MLSTMCell as MLSTMCell,
    )
    from metalcore.xlstm.layers import (
        MLSTMLayer as MLSTMLayer,
    )
    from metalcore.xlstm.layers import (
        SLSTMLayer as SLSTMLayer,
    )
    from metalcore.xlstm.layers import (
        XLSTMBlock as XLSTMBlock,
    )
    from metalcore.xlstm.model import XLSTM as XLSTM

_PACKED = ("GGMLEmbedding", "GGMLLinear", "Int4Linear", "Int8Linear")
_XLSTM = ("MLSTMCell", "MLSTMLayer", "SLSTMLayer", "XLSTMBlock")
_ELSEWHERE = {
    **dict.fromkeys(_PACKED, "metalcore._quantized_layers"),
    **dict.fromkeys(_XLSTM, "metalcore.xlstm.layers"),
    "XLSTM": "metalcore.xlstm.model",
}


def __getattr__(name: str) -> Any:
    """Layers of packed weights and of xLSTM are loaded when they are asked for, with their ops."""
    if name in _ELSEWHERE:
        return getattr(import_module(_ELSEWHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` computed by metalcore: same arguments, same state_dict.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as for `torch.nn.RMSNorm`.
        weight_offset: added to the weight; 1 for Gemma, which stores `weight - 1`.

    Example:
        >>> y = metalcore.nn.RMSNorm(1025)(torch.randn(2, 5, 1025))
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
    ) -> None:
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        self.weight_offset = weight_offset
        super().__init__(shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        shape = self.normalized_shape if self.weight is None else None
        return rms_norm(
            x, self.weight, self.eps, normalized_shape=shape, weight_offset=self.weight_offset
        )


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` computed by metalcore: same arguments, same state_dict.

    Example:
        >>> y = metalcore.nn.LayerNorm(1025)(torch.randn(2, 5, 1025))
    """

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class FusedAddRMSNorm(torch.nn.Module):
    """RMSNorm of `input + residual`; `residual` is updated in place.

    Example:
        >>> norm = metalcore.FusedAddRMSNorm(4096)
        >>> hidden = norm(attention_output, residual)
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float | None = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, input: Tensor, residual: Tensor) -> Tensor:
        return fused_add_rmsnorm(input, residual, self.weight, self.eps)[0]

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class RotaryEmbedding(torch.nn.Module):
    """Cosines and sines of positions, for `apply_rotary_pos_emb`. It holds no state.

    Args:
        dim: how many values are rotated.
        max_position_embeddings: kept for reference; any position works.
        base: wavelengths reach from 2 pi to nearly 2 pi * base.
        interleaved: for rotations of neighbours.

    Example:
        >>> rope = metalcore.RotaryEmbedding(128, max_position_embeddings=2048)
        >>> cos, sin = rope(seq_len=64)
        >>> cos, sin = rope(hidden, position_ids)
    """

    def __init__(
        self,
        dim: int,
        max_position_embeddings: int = 2048,
        base: float = 10000.0,
        device: torch.device | str | None = None,
        *,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        expect(dim > 0 and dim % 2 == 0, "RotaryEmbedding", f"dim must be even, got {dim}")
        self.dim, self.base, self.interleaved = dim, base, interleaved
        self.max_position_embeddings, self.device = max_position_embeddings, device

    def forward(
        self,
        x: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_len: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """cos and sin, [S, dim] for the first `seq_len` positions or [..., S, dim] for
        `position_ids` [..., S]; with x's dtype and device, else float32."""
        device = x.device if x is not None else self.device
        if position_ids is None:
            expect(seq_len is not None, "RotaryEmbedding", "pass position_ids or seq_len, got None")
            position_ids = torch.arange(seq_len or 0, device=device)
        # computed here and in float32, because a buffer would become float16 with its model
        exponent = torch.arange(0, self.dim, 2, device=position_ids.device).float() / self.dim
        angle = position_ids[..., None].float() * self.base**-exponent
        angle = (
            angle.repeat_interleave(2, -1) if self.interleaved else torch.cat((angle, angle), -1)
        )
        dtype = torch.float32 if x is None else x.dtype
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base}, interleaved={self.interleaved}"


class SiLU(torch.nn.SiLU):
    """`torch.nn.SiLU` computed by metalcore.

    Example:
        >>> y = metalcore.nn.SiLU()(torch.randn(2, 5, 1025))
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.copy_(silu(x)) if self.inplace else silu(x)


class GELU(torch.nn.GELU):
    """`torch.nn.GELU` computed by metalcore; `approximate` is "none" or "tanh".

    Example:
        >>> y = metalcore.nn.GELU("tanh")(torch.randn(2, 5, 1025))
    """

    def forward(self, x: Tensor) -> Tensor:
        return gelu(x, self.approximate)


class Softmax(torch.nn.Softmax):
    """`torch.nn.Softmax` computed by metalcore; `dim` is the last one unless told.

    Example:
        >>> y = metalcore.nn.Softmax()(torch.randn(2, 5, 1025))
    """

    def __init__(self, dim: int | None = -1) -> None:
        super().__init__(dim)

    def forward(self, x: Tensor) -> Tensor:
        return softmax(x, -1 if self.dim is None else self.dim)


class EmbeddingBag(torch.nn.EmbeddingBag):
    """`torch.nn.EmbeddingBag` computed by metalcore: same arguments, same state_dict.

    Example:
        >>> bags = metalcore.MetalEmbeddingBag(1000, 64, mode="sum")
        >>> y = bags(torch.randint(1000, (8, 20)))
    """

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        return embedding_bag(
            input,
            self.weight,
            offsets,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            per_sample_weights,
            self.include_last_offset,
            self.padding_idx,
        )
