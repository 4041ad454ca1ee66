# SPDX-License-Identifier: MIT
"""The arrays among arguments and results, which may stand in lists, tuples and dicts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import torch
from torch import Tensor

from metalcore.mlx.exchange import torch_dtype


class Place(NamedTuple):
    """Where an array stands: the how-manieth it is."""

    number: int


class Shape(NamedTuple):
    """A value with `Place`s for its arrays."""

    value: Any
    arrays: int


class Filled:
    """The arguments of one call: what they are but for the values of arrays is their `key`."""

    def __init__(self, value: Any, arrays: list[mx.array]) -> None:
        self._value, self.arrays = value, arrays

    @property
    def key(self) -> Any:
        kinds = tuple((tuple(a.shape), a.dtype) for a in self.arrays)
        return _hashable(self._value), kinds

    @classmethod
    def of(cls, args: Sequence[Any], named: dict[str, Any]) -> "Filled":
        arrays: list[Any] = []
        return cls(_taken((tuple(args), named), mx.array, arrays), arrays)

    @staticmethod
    def outputs(value: Any) -> tuple[list[Tensor], Shape]:
        tensors: list[Any] = []
        shape = _taken(value, Tensor, tensors)
        return tensors, Shape(shape, len(tensors))

    def with_values(self, values: Sequence[Any]) -> Any:
        return _put(self._value, values)


def filled(shape: Shape, values: Sequence[Any]) -> Any:
    return _put(shape.value, values)


def _taken(value: Any, kind: type, found: list[Any]) -> Any:
    """`value` with places where there is a `kind`, which go to `found`. What MLX calls a dtype is
    one of torch's."""
    if value is None:
        return None
    if isinstance(value, kind):
        found.append(value)
        return Place(len(found) - 1)
    if isinstance(value, mx.Dtype):
        return torch_dtype(value)
    return _mapped(value, lambda v: _taken(v, kind, found))


def _put(value: Any, values: Sequence[Any]) -> Any:
    if isinstance(value, Place):
        return values[value.number]
    return _mapped(value, lambda v: _put(v, values))


def _mapped(value: Any, function: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(function, value))
    # results of torch, such as torch.return_types.qr, become plain tuples
    if isinstance(value, tuple):
        return tuple(map(function, value))
    if isinstance(value, list):
        return [function(v) for v in value]
    if isinstance(value, dict):
        return {k: function(v) for k, v in value.items()}
    return value


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((k, _hashable(v)) for k, v in sorted(value.items()))
    if isinstance(value, (list, tuple)) and not isinstance(value, (Place, torch.Size)):
        return (type(value), *map(_hashable, value))
    return value if not isinstance(value, float) else ("float", value)
