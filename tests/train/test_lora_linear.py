# SPDX-License-Identifier: MIT
"""A linear layer with an adapter, whichever way its products are computed."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend
from tests.train.products import by_torch, in_blocks

OP = "lora_linear"
T, K, N, RANK = 7, 24, 10, 3


@pytest.fixture(params=["torch", "blocks"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision products by torch, and in blocks of float32."""
    (in_blocks if request.param == "blocks" else by_torch)(monkeypatch)


def _inputs(backend: Backend, dtype: torch.dtype) -> list[Tensor]:
    sizes = ((T, K), (N, K), (RANK, K), (N, RANK), (N,))
    return [backend.randn(*s, dtype=dtype).requires_grad_() for s in sizes]


def _plain(x: Tensor, weight: Tensor, A: Tensor, B: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias) + 0.5 * F.linear(F.linear(x, A), B)


def _check(found: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    off, allowed = error(found, truth), tolerance(OP, dtype, K)
    assert off <= allowed, f"error {off:.3g} is over {allowed:.3g}"


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_equals_the_plain_composition(device: Backend, dropout: float) -> None:
    for dtype in device.dtypes:
        for has_bias in (False, True):
            leaves = _inputs(device, dtype)[: 4 + has_bias]
            doubles = [t.detach().cpu().double().requires_grad_() for t in leaves]
            torch.manual_seed(1)
            y = metalcore.lora_linear(*leaves, scale=0.5, dropout=dropout)
            torch.manual_seed(1)
            # the same seed leaves out the same inputs as torch's own function
            kept = F.dropout(torch.ones(T, K, device=device.device), dropout).cpu() != 0
            x, weight, A, B, *bias = doubles
            low = F.linear(x * kept / (1 - dropout), A)
            truth = F.linear(x, weight, *bias) + 0.5 * F.linear(low, B)
            assert y.dtype == dtype
            _check(y, truth, dtype)
            seed = torch.randn(T, N).to(dtype)
            grads = torch.autograd.grad(y, leaves, seed.to(y.device))
            for a, b in zip(grads, torch.autograd.grad(truth, doubles, seed.double()), strict=True):
                assert a.dtype == dtype
                _check(a, b, dtype)


@pytest.mark.usefixtures("_way")
def test_half_precision_weights_with_float32_adapters(device: Backend) -> None:
    x, weight, A, B, _ = _inputs(device, torch.bfloat16)
    A, B = (t.detach().float().requires_grad_() for t in (A, B))
    leaves = (x, weight, A, B)
    doubles = [t.detach().cpu().double().requires_grad_() for t in leaves]
    y, truth = metalcore.lora_linear(*leaves, scale=0.5), _plain(*doubles)
    assert y.dtype == torch.bfloat16
    _check(y, truth, torch.bfloat16)
    grads = torch.autograd.grad(y.sum(), leaves)
    for leaf, a, b in zip(leaves, grads, torch.autograd.grad(truth.sum(), doubles), strict=True):
        assert a.dtype == leaf.dtype
        _check(a, b, torch.bfloat16)


@pytest.mark.usefixtures("_way")
def test_derivatives() -> None:
    sizes = ((2, 4), (3, 4), (2, 4), (3, 2), (3,))
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in sizes]

    def y(*leaves: Tensor) -> Tensor:
        torch.manual_seed(1)
        return metalcore.lora_linear(*leaves, scale=0.5, dropout=0.3)

    assert torch.autograd.gradcheck(y, leaves)
    assert torch.autograd.gradgradcheck(y, leaves)


class _Shapes(TorchDispatchMode):
    """The shapes of all that torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor) and not func.is_view:
            self.seen.append(tuple(output.shape))
        return output


@pytest.mark.usefixtures("_way")
def test_a_frozen_weight_costs_nothing_and_is_not_merged() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, A, B, _ = _inputs(Backend("cpu"), dtype)
        weight = weight.detach()
        with _Shapes() as shapes:
            y = metalcore.lora_linear(x, weight, A, B, dropout=0.1)
            torch.autograd.grad(y.sum(), (x, A, B))
        assert (N, K) not in shapes.seen
        assert (K, N) not in shapes.seen


def test_only_what_is_wanted_is_computed() -> None:
    leaves = _inputs(Backend("cpu"), torch.float64)
    for wanted in range(5):
        inputs = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(leaves)]
        torch.manual_seed(1)
        y = metalcore.lora_linear(*inputs, dropout=0.5)
        torch.manual_seed(1)
        everything = metalcore.lora_linear(*leaves, dropout=0.5)
        (found,) = torch.autograd.grad(y.sum(), inputs[wanted])
        torch.testing.assert_close(found, torch.autograd.grad(everything.sum(), leaves)[wanted])


def test_dropout_holds_a_byte_per_input() -> None:
    x, weight, A, B, _ = _inputs(Backend("cpu"), torch.float32)
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        metalcore.lora_linear(x, weight, A, B, dropout=0.5)
    given = {t.data_ptr() for t in (x, weight, A, B)}
    assert sum(t.nbytes for t in held if t.data_ptr() not in given) == x.numel()


def test_without_training_there_is_no_dropout() -> None:
    x, weight, A, B, _ = _inputs(Backend("cpu"), torch.float64)
    y = metalcore.lora_linear(x, weight, A, B, scale=0.5, dropout=0.9, training=False)
    torch.testing.assert_close(y, _plain(x, weight, A, B))
    everything = metalcore.lora_linear(x, weight, A, B, scale=0.5, dropout=1.0)
    torch.testing.assert_close(everything, F.linear(x, weight))


@pytest.mark.usefixtures("_way")
def test_leading_dimensions_strides_and_no_rows(device: Backend) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _, weight, A, B, bias = _inputs(device, dtype)
        wide = device.randn(2, K, 3, dtype=dtype).requires_grad_()
        for x in (wide.transpose(1, 2), wide[0, :, 1], wide.transpose(1, 2)[:0]):
            y = metalcore.lora_linear(x, weight, A, B, bias, 0.5)
            assert y.shape == (*x.shape[:-1], N)
            doubles = [t.cpu().double() for t in (x, weight, A, B, bias)]
            _check(y, _plain(*doubles), dtype)
            (dx,) = torch.autograd.grad(y.sum(), wide)
            assert dx.isfinite().all()


def test_autocast_multiplies_in_half_precision() -> None:
    leaves = _inputs(Backend("cpu"), torch.float32)[:4]
    with torch.autocast("cpu", torch.bfloat16):
        y = metalcore.lora_linear(*leaves, scale=0.5)
    assert y.dtype == torch.bfloat16
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    truth = _plain(*doubles)
    _check(y, truth, torch.bfloat16)
    grads = torch.autograd.grad(y.float().sum(), leaves)
    for a, b in zip(grads, torch.autograd.grad(truth.sum(), doubles), strict=True):
        assert a.dtype == torch.float32
        _check(a, b, torch.bfloat16)


def test_compiles_without_graph_breaks(device: Backend) -> None:
    leaves = _inputs(device, torch.float32)
    for dropout in (0.0, 1.0):  # 1.0, because compilers draw other numbers

        def y(*leaves: Tensor, dropout: float = dropout) -> Tensor:
            return metalcore.lora_linear(*leaves, scale=0.5, dropout=dropout)

        compiled = torch.compile(y, fullgraph=True, backend="aot_eager", dynamic=True)
        torch.testing.assert_close(compiled(*leaves), y(*leaves))
        found = torch.autograd.grad(compiled(*leaves).sum(), leaves)
        torch.testing.assert_close(found, torch.autograd.grad(y(*leaves).sum(), leaves))


def test_function_transforms() -> None:
    leaves = [t.detach().double() for t in _inputs(Backend("cpu"), torch.float32)]
    x = torch.randn(4, T, K, dtype=torch.float64)
    y = torch.vmap(lambda x: metalcore.lora_linear(x, *leaves[1:]))(x)
    torch.testing.assert_close(y, metalcore.lora_linear(x, *leaves[1:]))
    found = torch.func.grad(lambda A: metalcore.lora_linear(*leaves[:2], A, leaves[3]).sum())
    A = leaves[2].clone().requires_grad_()
    (expected,) = torch.autograd.grad(_plain(*leaves[:2], A, 2 * leaves[3]).sum(), A)
    torch.testing.assert_close(found(leaves[2]), expected)


def test_a_trace_shows_that_torch_multiplies() -> None:
    with metalcore.trace() as t:
        metalcore.lora_linear(*_inputs(Backend("cpu"), torch.float32))
    assert t.paths == {"lora_linear": {"torch"}}


x7, w10 = torch.randn(7, 24), torch.randn(10, 24)
a3, b3 = torch.randn(3, 24), torch.randn(10, 3)
BAD = [
    (
        lambda: metalcore.lora_linear(x7, w10[:, :9], a3, b3),
        ValueError,
        "x must be [..., K] and weight [N, K]; got x [7, 24] and weight [10, 9]",
    ),
    (
        lambda: metalcore.lora_linear(x7, w10, a3.T, b3),
        ValueError,
        "A must be [r, K] and B [N, r] where the weight is [N, K]; got A [24, 3], B [10, 3] and "
        "the weight [10, 24]",
    ),
    (
        lambda: metalcore.lora_linear(x7, w10.double(), a3, b3),
        TypeError,
        "all of these must have one dtype, got x float32 and weight float64; convert with .to()",
    ),
    (
        lambda: metalcore.lora_linear(x7, w10, a3, b3.half()),
        TypeError,
        "all of these must have one dtype, got A float32 and B float16; convert with .to()",
    ),
    (
        lambda: metalcore.lora_linear(x7, w10, a3, b3, torch.randn(9)),
        ValueError,
        "bias must have the shape [10], got [9]",
    ),
    (
        lambda: metalcore.lora_linear(x7, w10, a3, b3, dropout=1.5),
        ValueError,
        "dropout must be from 0 to 1, got 1.5",
    ),
    (
        lambda: metalcore.lora_linear(x7.long(), w10, a3, b3),
        TypeError,
        "x must be float32, float64, float16 or bfloat16, got int64; convert it with x.float()",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == f"lora_linear: {message}"
