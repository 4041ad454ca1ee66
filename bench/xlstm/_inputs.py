# SPDX-License-Identifier: MIT
"""Inputs of an mLSTM, and who else computes it."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


def sequence(heads: int, length: int, size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    q, k, v = (torch.randn(1, heads, length, size).to(dtype) for _ in range(3))
    i, f = torch.randn(1, heads, length) - 2, torch.randn(1, heads, length) + 3
    return q, k, v, i.to(dtype), f.to(dtype)


def native(module: str, name: str, **how: Any) -> dict[str, Callable[..., Any]]:
    """A function of mlstm_kernels, where that is installed."""
    if find_spec("mlstm_kernels") is None:
        return {}

    def run(*args: Tensor) -> Any:
        return getattr(import_module(f"mlstm_kernels.torch.{module}"), name)(*args, **how)

    return {"mlstm_kernels": run}
