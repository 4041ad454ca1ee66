# SPDX-License-Identifier: MIT
"""GEGLU on every backend, and what is peculiar to it."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore
from tests.backends import Backend
from tests.check import check_op, check_registration
from tests.train import elementwise
from tests.train.elementwise import each_case


def _torch(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


PAIRS = [
    (partial(metalcore.geglu, approximate=kind), partial(_torch, approximate=kind))
    for kind in ("none", "tanh")
]


@each_case
def test_matches_reference(backend: Backend, size: tuple[int, ...]) -> None:
    for dtype in backend.dtypes:
        for tanh in (False, True):
            dy, gate, up = (backend.randn(*size, dtype=dtype) for _ in range(3))
            check_op(backend, "geglu", (gate, up, tanh), reduces_over=1)
            args = (dy, gate, up, tanh)
            check_op(backend, "geglu_backward", args, reduces_over=1, differentiable=False)


def test_equals_torch_in_any_layout() -> None:
    for ours, theirs in PAIRS:
        elementwise.check_equals_torch(
            "geglu",
            ours,
            theirs,
            2,
        )


def test_the_trace_names_the_way() -> None:
    elementwise.check_path("geglu", partial(metalcore.geglu, approximate="tanh"), 2)


def test_hard_values(backend: Backend) -> None:
    def op(gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
        return torch.ops.metalcore.geglu(gate, up, tanh)  # type: ignore[no-any-return]

    for tanh, (_, theirs) in zip((False, True), PAIRS, strict=True):
        elementwise.check_hard_values(backend, partial(op, tanh=tanh), theirs, 2)


def test_compiles_without_graph_breaks() -> None:
    elementwise.check_compiles(partial(metalcore.geglu, approximate="tanh"), 2)


def test_function_transforms(backend: Backend) -> None:
    elementwise.check_transforms(backend, metalcore.geglu, 2)


def test_autocast_keeps_the_dtypes_of_torch() -> None:
    elementwise.check_autocast(metalcore.geglu, _torch, 2)


def test_derivatives_and_registration() -> None:
    dy, gate, up = torch.randn(3, 2, 5)
    for tanh in (False, True):
        check_registration("geglu", (gate, up, tanh))
        check_registration("geglu_backward", (dy, gate, up, tanh))


x8 = torch.randn(2, 8)
BAD = [
    (
        lambda: metalcore.geglu(x8.long(), x8),
        TypeError,
        "geglu: gate must be float32, float64, float16 or bfloat16, got int64; "
        "convert it with gate.float()",
    ),
    (
        lambda: metalcore.geglu(x8, x8, "fast"),
        ValueError,
        "geglu: approximate must be one of none, tanh, got 'fast'",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
