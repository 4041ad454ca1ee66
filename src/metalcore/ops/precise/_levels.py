# SPDX-License-Identifier: MIT
"""Levels of precision, and what reductions over any dimensions have in common."""

from collections.abc import Sequence
from importlib import import_module

import torch
from torch import Tensor

from metalcore._check import expect_dim, one_of, refuse, shape

LEVELS = ("compensated", "exact", "float64")
"""By their numbers in schemas."""


def level_number(op: str, level: str, x: Tensor) -> int:
    if level not in LEVELS:
        refuse(op, f"level must be known; {one_of(LEVELS, [str(level)])}")
    if level == "exact" and x.device.type not in ("cpu", "mps", "meta"):
        refuse(op, f"exact sums are of tensors on cpu or mps, got {x.device}; move it with .to()")
    if level != "exact" and x.device.type == "mps":
        import_module("metalcore.metal.precise._self_test").expect_error_free()
    return LEVELS.index(level)


def as_rows(op: str, x: Tensor, dim: int | Sequence[int] | None) -> tuple[Tensor, list[int]]:
    """`x` as [..., n] with the dimensions `dim` in the last one, and which they were."""
    if dim is None:
        return x.flatten(), list(range(x.dim()))
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    for d in dims:
        expect_dim(op, x, d)
    if x.dim() == 0:
        return x[None], []
    dims = sorted(d % x.dim() for d in dims)
    if len(set(dims)) < len(dims):
        refuse(op, f"dim must not repeat; got {dims} for x {shape(x)}")
    kept = [d for d in range(x.dim()) if d not in dims]
    return x.permute(*kept, *dims).flatten(len(kept)), dims


def kept_dims(y: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """The result of rows, with dimensions of one where some were added up."""
    for d in dims if keepdim else ():
        y = y.unsqueeze(d)
    return y


def widest(x: Tensor) -> Tensor:
    """`x` in the widest type of its device."""
    return x.float() if x.device.type == "mps" and x.dtype != torch.float64 else x.double()
