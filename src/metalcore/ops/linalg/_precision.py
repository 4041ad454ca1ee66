# SPDX-License-Identifier: MIT
"""Linear algebra in float64, on hardware that has it and on hardware that has not."""

from importlib import import_module
from typing import Any

from torch import Tensor

from metalcore._check import expect_float, expect_one_of
from metalcore._trace import is_simulated


def is_double(precision: str | None, *tensors: Tensor) -> bool:
    """Whether a call wants float64: by name, or because it is of DoubleFloats."""
    if precision is not None:
        return True
    return any(type(t) is not Tensor and hasattr(t, "high") for t in tensors)


def doubled(op: str, precision: str | None, **tensors: Tensor) -> tuple[Any, ...]:
    """What implements it for DoubleFloats, or None where the device has float64, and the tensors in
    one of both."""
    if precision is not None:
        expect_one_of(op, "precision", precision, ("float64",))
    expect_float(op, **tensors)
    values = list(tensors.values())
    lacks = any(hasattr(t, "high") or t.device.type == "mps" for t in values) or is_simulated()
    if not lacks:
        return None, *(t.double() for t in values)
    make = import_module("metalcore.ops.precise.double_float").DoubleFloat
    functions = import_module("metalcore.ops.precise._double_float_linalg")
    return functions, *map(make, values)
