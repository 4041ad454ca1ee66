# SPDX-License-Identifier: MIT
"""Modules: thin holders of parameters around the ops, with torch.nn's names and state_dicts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from metalcore.ops.train.add_rms_norm import fused_add_rmsnorm
from metalcore.ops.train.rms_norm import rms_norm


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


MetalRMSNorm = RMSNorm
