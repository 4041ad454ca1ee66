# SPDX-License-Identifier: MIT
"""How far a result may be from the float64 truth: one formula for tests, benchmarks and doctor.

    error = max |result - truth| / max |truth|
    allowed = c * max(eps(dtype), eps(accumulation type) * sqrt(reduction length))

Sums are kept in float32 (float64 for float64) and rounded to the dtype once, hence the two terms.
c is 4, or what an op says beside its meaning: `set_accuracy("qr", 16.0)`.
"""

import math

import torch
from torch import Tensor

_factors: dict[str, float] = {}


def set_accuracy(op: str, c: float) -> None:
    """Say the c of an op, and of its gradient, whose steps round more than one sum does."""
    _factors[op] = c


def tolerance(op: str, dtype: torch.dtype, reduces_over: int) -> float:
    """The largest allowed `error` of a result of `op` in `dtype`."""
    c = _factors.get(op.removesuffix("_").removesuffix("_backward"), 4.0)
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    return float(
        c * max(torch.finfo(dtype).eps, torch.finfo(sums).eps * math.sqrt(max(1, reduces_over)))
    )


def error(result: Tensor, truth: Tensor) -> float:
    """Largest difference relative to the largest value of `truth`; inf where NaNs do not agree."""
    if result.shape != truth.shape:
        return math.inf
    if result.numel() == 0:
        return 0.0
    a, b = result.detach().cpu().double(), truth.detach().cpu().double()
    if not torch.equal(a.isnan(), b.isnan()):
        return math.inf
    # inf - inf is NaN where both agree, and inf where they do not
    off = (a - b).abs().nan_to_num(nan=0.0, posinf=math.inf)
    scale = b[b.isfinite()].abs().max().item() if b.isfinite().any() else 0.0
    return off.max().item() / max(scale, torch.finfo(torch.float32).tiny)
