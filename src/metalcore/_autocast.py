# SPDX-License-Identifier: MIT
"""What ops do under `torch.autocast`: the only file that asks for it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on where x is; some devices, such as `meta`, have none."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def to_multiply(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors in the dtype in which autocast would multiply them."""
    first = next(t for t in tensors if t is not None)
    if not is_autocast(first):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def to_normalise(x: Tensor) -> Tensor:
    """x in the dtype in which autocast computes softmax and LayerNorm: float32 on GPUs."""
    return x.float() if not x.is_cpu and is_autocast(x) else x


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """For code that has cast already."""
    return torch.autocast(x.device.type, enabled=False) if is_autocast(x) else nullcontext()
