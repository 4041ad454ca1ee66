# SPDX-License-Identifier: MIT
"""Layers of `mlx.nn` that compute with metalcore: same arguments, parameters and names."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metalcore.mlx import _table
from metalcore.mlx._rope import rope as _rope

_rms_norm, _layer_norm = _table.made("rms_norm"), _table.made("layer_norm")
_silu, _gelu = _table.made("silu"), _table.made("gelu")


class RMSNorm(nn.RMSNorm):
    """`mlx.nn.RMSNorm` by `metalcore.mlx.rms_norm`."""

    def __call__(self, x: mx.array) -> mx.array:
        return _rms_norm(x, self["weight"], self.eps)


class LayerNorm(nn.LayerNorm):
    """`mlx.nn.LayerNorm` by `metalcore.mlx.layer_norm`."""

    def __call__(self, x: mx.array) -> mx.array:
        return _layer_norm(x, self.get("weight"), self.get("bias"), self.eps)


class RoPE(nn.RoPE):
    """`mlx.nn.RoPE` by `metalcore.mlx.rope`."""

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        how = {"traditional": self.traditional, "base": self.base, "scale": self.scale}
        return _rope(x, self.dims, **how, offset=offset)


class SiLU(nn.Module):
    """`mlx.nn.SiLU` by `metalcore.mlx.silu`."""

    def __call__(self, x: mx.array) -> mx.array:
        return _silu(x)


class GELU(nn.Module):
    """`mlx.nn.GELU` by `metalcore.mlx.gelu`.

    Args:
        approx: "none", or "precise" or "tanh" for the form with tanh, as `mlx.nn.GELU` calls them.
    """

    def __init__(self, approx: str = "none") -> None:
        super().__init__()
        self._approximate = "none" if approx == "none" else "tanh"

    def __call__(self, x: mx.array) -> mx.array:
        return _gelu(x, self._approximate)
