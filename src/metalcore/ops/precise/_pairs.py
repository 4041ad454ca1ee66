# SPDX-License-Identifier: MIT
"""Numbers as sums of two values of a type, as torch's float64 has them."""

import torch
from torch import Tensor


def joined(high: Tensor, low: Tensor) -> Tensor:
    return high.double() + low.double()


def split(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The nearest value of `dtype`, and what is left; of what is not finite, nothing is."""
    high = x.to(dtype)
    left = (x - high.double()).to(dtype)
    return high.contiguous(), torch.where(high.isfinite(), left, 0).contiguous()


def random_pair(*size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return split(torch.randn(*size, dtype=torch.float64), dtype)


def pair_dtype(dtype: torch.dtype) -> torch.dtype:
    """Pairs are of float32, or of float64 whose low parts are zero."""
    return torch.float64 if dtype == torch.float64 else torch.float32
