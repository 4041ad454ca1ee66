# SPDX-License-Identifier: MIT
"""What a plan knows of memory and of numbers: shapes and places, never data."""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

Shape = tuple[int, ...]


class Number:
    """A number of the call, or several: passed on to kernels, never looked at by a plan."""

    __slots__ = ("slot",)

    def __init__(self, slot: int) -> None:
        self.slot = slot

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("a plan may not look at a number that differs from call to call")

    __bool__ = __lt__ = __gt__ = __le__ = __ge__ = __eq__ = __float__ = __int__ = _refuse
    __hash__ = object.__hash__


@dataclass(frozen=True, eq=False)
class Buffer:
    """A place in memory with a shape: an argument, an output, scratch, or a view of one."""

    slot: int
    shape: Shape
    dtype: torch.dtype
    stride: Shape
    offset: int = 0
    """In values, from the first one of the slot."""
    is_base: bool = True
    """Whether this is all of the slot, as it was made or given."""
    slot_is_aligned: bool = True
    """Whether the slot starts at a multiple of four values."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        return self.numel == 0 or all(
            n == 1 or step == wanted
            for n, step, wanted in zip(self.shape, self.stride, strides(self.shape), strict=True)
        )

    @property
    def is_aligned(self) -> bool:
        """Whether kernels may read four values at a time from the start on."""
        return self.slot_is_aligned and self.offset % 4 == 0

    @property
    def mT(self) -> "Buffer":  # noqa: N802  (as torch calls it)
        return self.transpose(-2, -1)

    def transpose(self, a: int, b: int) -> "Buffer":
        shape, stride = list(self.shape), list(self.stride)
        shape[a], shape[b], stride[a], stride[b] = shape[b], shape[a], stride[b], stride[a]
        return self.as_strided(tuple(shape), tuple(stride), self.offset)

    def view(self, *shape: int) -> "Buffer":
        if -1 in shape:
            known = prod(n for n in shape if n != -1)
            shape = tuple(self.numel // known if n == -1 else n for n in shape)
        if not self.is_contiguous or prod(shape) != self.numel:
            raise ValueError(f"a {self.shape} buffer has no view of the shape {shape}")
        return self.as_strided(shape, strides(shape), self.offset)

    def expand(self, *shape: int) -> "Buffer":
        missing = len(shape) - len(self.shape)
        own = (1,) * missing + self.shape
        stride = tuple(
            0 if n != m else s
            for n, m, s in zip(own, shape, (0,) * missing + self.stride, strict=True)
        )
        return self.as_strided(shape, stride, self.offset)

    def __getitem__(self, cuts: slice | int | tuple[slice | int, ...]) -> "Buffer":
        """By slices without steps and by numbers, one for each of the first dimensions."""
        shape, stride, offset = [], [], self.offset
        cuts = cuts if isinstance(cuts, tuple) else (cuts,)
        rest = [slice(None)] * (len(self.shape) - len(cuts))
        for size, step, cut in zip(self.shape, self.stride, (*cuts, *rest), strict=True):
            if isinstance(cut, int):
                offset += cut * step
                continue
            start, stop, _ = cut.indices(size)
            shape.append(max(0, stop - start))
            stride.append(step)
            offset += start * step
        return self.as_strided(tuple(shape), tuple(stride), offset)

    def diagonal(self) -> "Buffer":
        """Of the last two dimensions."""
        size, step = min(self.shape[-2:]), self.stride[-2] + self.stride[-1]
        shape, stride = (*self.shape[:-2], size), (*self.stride[:-2], step)
        return self.as_strided(shape, stride, self.offset)

    def memory(self) -> "Buffer":
        """All values from the first to the last one, those between them included."""
        ends = ((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return self.as_strided((1 + sum(ends) if self.numel else 0,), (1,), self.offset)

    def as_strided(self, shape: Shape, stride: Shape, offset: int) -> "Buffer":
        return replace(self, shape=shape, stride=stride, offset=offset, is_base=False)


def strides(shape: Shape) -> Shape:
    """Those of contiguous memory."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
