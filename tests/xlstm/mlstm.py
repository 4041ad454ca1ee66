# SPDX-License-Identifier: MIT
"""Inputs of an mLSTM, and its recurrence step by step, the definition."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def inputs(
    B: int, H: int, T: int, D: int, E: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """q, k, v, i, f. Small input gates, so that hardly any divisor is a difference of large
    numbers, which rounding changes much."""
    q, k, v = (torch.randn(B, H, T, n).to(dtype) for n in (D, D, E))
    i, f = torch.randn(B, H, T) - 2, torch.randn(B, H, T) + 2
    return q, k, v, i.to(dtype), f.to(dtype)


def states(N: int, H: int, D: int, E: int, dtype: torch.dtype = torch.float32) -> Any:
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    c, n, m = torch.randn(N, H, D, E), torch.randn(N, H, D), torch.randn(N, H) - 1
    return c.to(sums), n.to(sums), m.to(sums)


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, states: Any = None, eps: float = 1e-6
) -> tuple[Tensor, Any]:
    """The exponential gate, one step after the other."""
    B, H, T, D = q.shape
    if states is None:
        c, n, m = q.new_zeros(B, H, D, v.shape[3]), q.new_zeros(B, H, D), q.new_zeros(B, H)
    else:
        c, n, m = states
    found = []
    for t in range(T):
        lf = F.logsigmoid(f[..., t])
        now = torch.maximum(lf + m, i[..., t])
        keep, add = (lf + m - now).exp(), (i[..., t] - now).exp()
        c = keep[..., None, None] * c + add[..., None, None] * (
            k[:, :, t, :, None] * v[:, :, t, None]
        )
        n = keep[..., None] * n + add[..., None] * k[:, :, t]
        m = now
        query = q[:, :, t] * D**-0.5
        divisor = torch.maximum((query * n).sum(-1).abs(), (-m).exp()) + eps
        found.append((query[..., None, :] @ c)[..., 0, :] / divisor[..., None])
    return torch.stack(found, 2), (c, n, m)


def distance(x: Tensor, truth: Tensor) -> float:
    """Relative, of all values together."""
    x, truth = x.detach().double(), truth.detach()
    return float((x - truth).norm() / truth.norm())
