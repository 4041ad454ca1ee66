# SPDX-License-Identifier: MIT
"""SwiGLU on every backend, and what is peculiar to it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore
from metalcore._op import Op
from tests.backends import FLOATS, Backend
from tests.check import check_op, check_registration
from tests.train import elementwise
from tests.train.elementwise import each_case


def _torch(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@each_case
def test_matches_reference(backend: Backend, size: tuple[int, ...]) -> None:
    for dtype in backend.dtypes:
        dy, gate, up = (backend.randn(*size, dtype=dtype) for _ in range(3))
        check_op(backend, "swiglu", (gate, up), reduces_over=1)
        check_op(backend, "swiglu_backward", (dy, gate, up), reduces_over=1, differentiable=False)


def test_equals_torch_in_any_layout() -> None:
    elementwise.check_equals_torch("swiglu", metalcore.swiglu, _torch, 2)


def test_the_trace_names_the_way() -> None:
    elementwise.check_path("swiglu", metalcore.swiglu, 2)


def test_hard_values(backend: Backend) -> None:
    elementwise.check_hard_values(backend, torch.ops.metalcore.swiglu, _torch, 2)


def test_compiles_without_graph_breaks() -> None:
    elementwise.check_compiles(metalcore.swiglu, 2, by_inductor=True)


def test_function_transforms(backend: Backend) -> None:
    elementwise.check_transforms(backend, metalcore.swiglu, 2)


def test_autocast_keeps_the_dtypes_of_torch() -> None:
    elementwise.check_autocast(metalcore.swiglu, _torch, 2)


def test_derivatives_and_registration() -> None:
    dy, gate, up = torch.randn(3, 2, 5)
    check_registration("swiglu", (gate, up))
    check_registration("swiglu_backward", (dy, gate, up))


def test_shapes_broadcast_and_dtypes_promote(backend: Backend) -> None:
    gate, up = backend.randn(130, 1, 65), backend.randn(3, 65, dtype=torch.bfloat16)
    y = metalcore.swiglu(gate, up)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.cpu(), _torch(gate.cpu(), up.cpu().float()))


@pytest.mark.parametrize("size", [(3, 8192), (2, 5, 200), (4, 60), (2, 1, 3, 131072)])
def test_halves_of_rows_are_read_where_they_are(size: tuple[int, ...]) -> None:
    op, backward = Op.all["swiglu"], Op.all["swiglu_backward"]
    for dtype in FLOATS:
        gate, up = torch.randn(size).to(dtype).chunk(2, -1)
        dy = torch.randn(gate.shape).to(dtype)
        dense = gate.contiguous(), up.contiguous()
        assert torch.equal(op(gate, up), op(*dense))
        assert torch.equal(op(gate, dense[1]), op(*dense))
        for a, b in zip(backward(dy, gate, up), backward(dy, *dense), strict=True):
            assert torch.equal(a, b)
    # rows that are not equally far apart, and one row for all
    gate = torch.randn(4, 6, 200)[:, :5, :100]
    assert torch.equal(op(gate, gate), op(gate.contiguous(), gate.contiguous()))
    one = torch.randn(100).expand(3, 100)
    assert torch.equal(op(one, one), op(one.contiguous(), one.contiguous()))


def test_gradient_by_hand(backend: Backend) -> None:
    dy, gate, up = (backend.randn(6, 33) for _ in range(3))
    leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    truth = torch.autograd.grad(_torch(*leaves), leaves, dy)
    torch.testing.assert_close(metalcore.swiglu_bwd(dy, gate, up), truth)


x8 = torch.randn(2, 8)
BAD = [
    (
        lambda: metalcore.swiglu(x8.long(), x8),
        TypeError,
        "swiglu: gate must be float32, float64, float16 or bfloat16, got int64; "
        "convert it with gate.float()",
    ),
    (
        lambda: metalcore.swiglu(x8, torch.randn(2, 7)),
        ValueError,
        "swiglu: shapes must broadcast together, got gate [2, 8] and up [2, 7]",
    ),
    (
        lambda: metalcore.swiglu(x8, x8.to("meta")),
        ValueError,
        "swiglu: tensors must be on one device, got gate on cpu and up on meta; "
        "move them with .to()",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
