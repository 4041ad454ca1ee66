# SPDX-License-Identifier: MIT
"""What is no tensor, sparse or without data: every public function says what it wants, or works."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from metalcore import linalg, train
from tests.test_forward_mode import calls

FUNCTIONS = [
    *(getattr(linalg, n) for n in linalg.__all__),
    *(getattr(train, n) for n in train.__all__ if n[0].islower()),
]


def _required(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.annotation in (Tensor, "Tensor")]


def _arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """Tensors for all that must be given; which of them is wrong is told before their shapes."""
    parameters = inspect.signature(function).parameters.values()
    needed = [p for p in parameters if p.default is p.empty]
    known = {"side": "left", "dim": 0, "cap": 2.0, "scale": 1.0, "normalized_shape": (4,)}
    known |= {n: torch.eye(4) for n in ("weight", "gate", "up") if function.__name__ != "geglu"}
    known |= {p.name: torch.eye(4) for p in needed if p.name.startswith("W_")}
    known |= {p.name: None for p in needed if p.annotation not in (Tensor, "Tensor")} | known
    return {p.name: known.get(p.name, torch.eye(4).expand(3, 4, 4)) for p in needed}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "wrong", [None, [[1.0, 2.0]], np.eye(4), 3.0], ids=lambda w: type(w).__name__
)
def test_what_is_no_tensor_is_named(function: Callable[..., Any], wrong: Any) -> None:
    for name in _required(function):
        with pytest.raises(TypeError) as caught:
            function(**_arguments(function) | {name: wrong})
        kind = type(wrong).__name__
        assert str(caught.value) == f"{function.__name__}: {name} must be a Tensor, got {kind}"


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_sparse_tensors_are_refused(function: Callable[..., Any]) -> None:
    for name in _required(function):
        with pytest.raises(TypeError) as caught:
            function(**_arguments(function) | {name: torch.eye(4).to_sparse()})
        start = f"{function.__name__}: {name} must be dense, got sparse_coo"
        assert str(caught.value) == f"{start}; convert it with {name}.to_dense()"


def _kinds(found: Any) -> list[Any]:
    """Shapes, dtypes and strides; a dimension of one value has any stride."""
    outputs = [found] if isinstance(found, Tensor) else list(found)
    return [
        (o.shape, o.dtype, [s for s, n in zip(o.stride(), o.shape, strict=True) if n > 1])
        for o in outputs
    ]


@pytest.mark.parametrize("name", list(calls()))
def test_tensors_without_data_have_the_shapes_of_others(name: str) -> None:
    call, args = calls()[name]
    truth = call(*args)
    with torch.device("meta"):
        call, args = calls()[name]
        found = call(*args)
    assert _kinds(found) == _kinds(truth)
    assert all(o.is_meta for o in ([found] if isinstance(found, Tensor) else found))
