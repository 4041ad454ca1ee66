# SPDX-License-Identifier: MIT
"""Where tensors and arrays lie, and which of their bytes have been written."""

from __future__ import annotations

from typing import Any

import numpy as np


def is_tensor(value: object) -> bool:
    """Whether `value` is a torch tensor; torch itself is never imported."""
    return type(value).__module__.split(".")[0] == "torch" and hasattr(value, "untyped_storage")


def extent(value: Any) -> tuple[int, int, int]:
    """Address and size of the whole storage behind a CPU tensor or array, and where it starts."""
    if is_tensor(value):
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.nbytes(), value.data_ptr()
    root = value
    while isinstance(root.base, np.ndarray):
        root = root.base
    low, high = np.lib.array_utils.byte_bounds(root) if root.size else (root.ctypes.data,) * 2
    return low, high - low, value.ctypes.data


class Uninitialized:
    """A buffer that is not written yet, or not all of it; see `uninitialized`.

    `array` is the tensor or array, `written` has a byte for each byte of its whole storage: 1 where
    something was written.
    """

    def __init__(self, array: Any, written: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.array = array
        self.written = written

    def view(self, array: Any) -> Uninitialized:
        """The same for another view of this memory; both know what is written through either."""
        return Uninitialized(array, self.written)

    def note_written(self) -> None:
        """Says that all of this view has a value now: something other than a kernel wrote it."""
        _bytes_of(self.array, self.written)[...] = 1

    def is_written(self) -> bool:
        """Whether all of this view has been written."""
        return bool(_bytes_of(self.array, self.written).all())


def uninitialized(array: Any) -> Uninitialized:
    """Marks a tensor or array as not written yet: a checked run reports reads before writes.

    Pass what is returned in place of `array`: it remembers from launch to launch what is written.
    """
    made = Uninitialized(array, np.ones(extent(array)[1], np.uint8))
    _bytes_of(array, made.written)[...] = 0
    return made


def _bytes_of(array: Any, written: np.ndarray[Any, np.dtype[np.uint8]]) -> Any:
    """The entries of `written` that stand for the bytes of `array`."""
    low, _, start = extent(array)
    shape, size = tuple(array.shape), array.itemsize
    strides = [step * size for step in array.stride()] if is_tensor(array) else array.strides
    return np.ndarray((*shape, size), np.uint8, written.data, start - low, (*strides, 1))
