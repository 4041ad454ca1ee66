# SPDX-License-Identifier: MIT
"""`"double_float"`: float64 as the sum of two float32, its functions, gradients and layouts."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore import precise
from metalcore._op import Op
from metalcore.precise import DoubleFloat
from tests.backends import Backend
from tests.check import check_op, check_registration

# What one function may lose, in units of the 48th bit.
BITS = 2.0**-48
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "number": lambda x, y: (2.5 + x / 3) * 0.1 - -(y * y),
    "sqrt": lambda x, y: x.sqrt(),
    "rsqrt": lambda x, y: x.rsqrt(),
    "exp": lambda x, y: (y * 20).exp(),
    "log": lambda x, y: x.log(),
    "pow": lambda x, y: x**5,
    "root": lambda x, y: x**-1.5,
    "any power": lambda x, y: x**0.3,
    "sum": lambda x, y: x.sum(-1),
    "mean": lambda x, y: x.mean((0, 1)),
    "matmul": lambda x, y: x @ y.mT,
    "linear": lambda x, y: torch.nn.functional.linear(x, y[0]),
    "norm": lambda x, y: (x * x).sum().sqrt(),
    "maximum": torch.maximum,
    "amax": lambda x, y: y.amax(1),
    "where": lambda x, y: torch.where(x > 1, x, y),
    "abs": lambda x, y: y.abs(),
}


def _numbers(size: tuple[int, ...], seed: int = 0) -> Tensor:
    """Float64 numbers from -1 to 1 that 48 bits hold."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-(2**46), 2**46, size, generator=generator)
    return whole.double() / 2**46


def _off(found: Tensor, truth: Tensor) -> float:
    wide = found.to(torch.float64)
    assert wide.shape == truth.shape
    return float(((wide - truth).abs() / truth.abs().clamp(min=1e-30)).max()) / BITS


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "fma", "sqrt", "exp", "log"])
@pytest.mark.parametrize("size", [(3, 33), (2, 2, 5), (7,), (1,), (0, 4)], ids=str)
def test_matches_reference(backend: Backend, name: str, size: tuple[int, ...]) -> None:
    operands = {"fma": 3, "sqrt": 1, "exp": 1, "log": 1}.get(name, 2)
    parts: list[Tensor | None] = []
    for i in range(operands):
        x = DoubleFloat(_numbers(size, i).abs() + 0.5)
        parts += [x.high.to(backend.device), x.low.to(backend.device)]
    args = (*parts, *[None] * (6 - len(parts)), name)
    check_op(backend, "double_float", args, reduces_over=1, differentiable=False)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_keep_48_bits(backend: Backend, name: str) -> None:
    x, y = _numbers((2, 9, 7), 1).abs() * 4 + 0.25, _numbers((2, 9, 7), 2)
    given = [DoubleFloat(v).to(backend.device) for v in (x, y)]
    with metalcore.trace() as t:
        found = FUNCTIONS[name](*given)
    assert isinstance(found, DoubleFloat)
    assert found.dtype == torch.float64
    assert {r.path.split(":")[0] for r in t.records} <= {backend.path}
    # exp(20) has an absolute error of its argument, of 5 bits
    allowed = {"exp": 20, "any power": 8, "pow": 8, "root": 8}.get(name, 4)
    if name in ("matmul", "linear"):
        truth = FUNCTIONS[name](x, y)
        assert float((found.cpu().to(torch.float64) - truth).abs().max()) < 16 * BITS * 4
    else:
        assert _off(found.cpu(), FUNCTIONS[name](x, y)) < allowed


def test_logarithms_of_almost_one(backend: Backend) -> None:
    x = 1 + torch.tensor([1, 5, 999, -7, -(2**20), 2**40, 2**45], dtype=torch.float64) / 2**46
    found = DoubleFloat(x).to(backend.device).log().cpu()
    assert _off(found, torch.log1p(x - 1)) < 8


def test_fma_is_rounded_once(backend: Backend) -> None:
    # what is left is below the 48 bits of the product
    x = DoubleFloat(torch.tensor([1 + 2.0**-40], dtype=torch.float64)).to(backend.device)
    product = DoubleFloat(torch.tensor([1 + 2.0**-39], dtype=torch.float64)).to(backend.device)
    assert isinstance(x, DoubleFloat)
    assert x.fma(x, -product).item() == 2.0**-80
    assert x.fma(2, 1).item() == 3 + 2.0**-39


def test_what_is_not_finite_and_zeros(backend: Backend) -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([inf, -inf, nan, 0.0, -0.0, 1.0, -1.0, 3e38], dtype=torch.float64)
    y = torch.tensor([1.0, inf, 1.0, 0.0, 2.0, inf, 0.0, 3e38], dtype=torch.float64)
    X, Y = DoubleFloat(x).to(backend.device), DoubleFloat(y).to(backend.device)
    for function in (torch.add, torch.sub, torch.mul, torch.div):
        truth = function(x, y)
        truth = torch.where(truth.abs() > 3.5e38, truth.sign() * inf, truth)
        found = function(X, Y).cpu().to(torch.float64)
        torch.testing.assert_close(found, truth, rtol=1e-7, atol=0, equal_nan=True)
    for name in ("sqrt", "exp", "log"):
        truth = getattr(x, name)()
        truth = torch.where(truth > 3.5e38, inf, truth)
        found = getattr(X, name)().cpu().to(torch.float64)
        torch.testing.assert_close(found, truth, rtol=1e-7, atol=1e-7, equal_nan=True)
    A = torch.tensor([[inf, 1.0], [1.0, 1.0]], dtype=torch.float64)
    found = (DoubleFloat(A).to(backend.device) @ DoubleFloat(A).to(backend.device)).cpu()
    assert found.to(torch.float64).tolist() == [[inf, inf], [inf, 2.0]]


def test_there_and_back_without_loss() -> None:
    x = _numbers((1000,))
    assert torch.equal(DoubleFloat(x).to(torch.float64), x)
    wide = torch.randn(1000, dtype=torch.float64)
    assert ((DoubleFloat(wide).double() - wide).abs() <= wide.abs() * BITS).all()
    assert torch.equal(DoubleFloat(wide).to(torch.float32), wide.float())
    assert torch.equal(DoubleFloat(wide.float()).to(torch.float64), wide.float().double())
    assert DoubleFloat(1.0, 2.0**-40).item() == 1 + 2.0**-40
    assert DoubleFloat([0.5, 0.25]).tolist() == [0.5, 0.25]
    assert DoubleFloat(x) is not None
    assert DoubleFloat(DoubleFloat(x)).shape == x.shape
    assert repr(DoubleFloat([0.5])) == "DoubleFloat([0.5000])"
    assert DoubleFloat(x).numpy().dtype == "float64"
    assert DoubleFloat(x).half().dtype == torch.float16


def test_comparisons() -> None:
    one = 1.0 + torch.tensor([0.0, 2.0**-40, -(2.0**-40)], dtype=torch.float64)
    X = DoubleFloat(one)
    for function in (torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne):
        assert torch.equal(function(X[:, None], X), function(one[:, None], one))
        assert torch.equal(function(X, 1.0), function(one, 1.0))
    assert torch.equal(X, DoubleFloat(one.clone()))
    assert not torch.equal(X, X.flip(0))
    assert X.isfinite().all()
    torch.testing.assert_close(
        torch.minimum(X, X.flip(0)).double(), torch.minimum(one, one.flip(0))
    )


def test_numbers_are_moved_with_both_parts() -> None:
    x = _numbers((4, 5, 6))
    X = DoubleFloat(x)
    pairs = [
        (X.mT, x.mT),
        (X[1:, ::2, None], x[1:, ::2, None]),
        (X.reshape(20, 6), x.reshape(20, 6)),
        (torch.cat([X, X * 0], 1), torch.cat([x, x * 0], 1)),
        (torch.stack([X, X]), torch.stack([x, x])),
        (X.split(2)[0], x.split(2)[0]),
        (X[torch.tensor([2, 0])], x[torch.tensor([2, 0])]),
        (X.expand(2, 4, 5, 6).sum(0), x * 2),
        (X.triu(), x.triu()),
        (X.diagonal(dim1=1, dim2=2), x.diagonal(dim1=1, dim2=2)),
        (torch.ones_like(X), torch.ones_like(x)),
        (torch.zeros_like(X) - X, -x),
        (torch.full_like(X, 0.1), torch.full_like(x, 0.1)),
        (X.masked_fill(x > 0, 0.5), x.masked_fill(x > 0, 0.5)),
    ]
    for found, truth in pairs:
        assert isinstance(found, DoubleFloat)
        torch.testing.assert_close(found.to(torch.float64), truth, rtol=BITS, atol=0)
    Y = X.clone()
    Y += X
    Y *= 2
    Y[0] = 0
    assert torch.equal(Y.double(), torch.cat([x[:1] * 0, x[1:] * 4]))


def test_gradients() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        X, Y = DoubleFloat(x), DoubleFloat(y)
        Z = (X * Y).exp() / (Y * Y + 1) + (X @ Y.mT).sum() - (X * X).log().mean(-1, keepdim=True)
        return ((Z.abs() + 1).sqrt() * X.fma(Y, Z)).to(torch.float64)

    x = (torch.rand(3, 4, dtype=torch.float64) + 0.5).requires_grad_()
    y = torch.randn(3, 4, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(function, (x, y))
    assert torch.autograd.gradgradcheck(function, (x, y))


def test_gradients_are_double_floats() -> None:
    x = DoubleFloat(_numbers((5,))).requires_grad_()
    (x * x * x).sum().backward()
    x.grad.add_(x.grad)
    assert isinstance(x.grad, DoubleFloat)
    assert _off(x.grad, 6 * x.detach().to(torch.float64) ** 2) < 8
    plain = torch.randn(5, requires_grad=True)
    (DoubleFloat(plain) * 3).sum().backward()
    assert plain.grad is not None
    assert plain.grad.dtype == torch.float32


def test_compiles_without_graph_breaks() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return ((x * y).exp() + x @ y.mT).sum()

    x, y = DoubleFloat(_numbers((4, 4))), DoubleFloat(_numbers((4, 4), 1))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert compiled(x, y).item() == function(x, y).item()


def test_derivatives_and_registration() -> None:
    for sample in Op.all["double_float"].samples:
        check_registration("double_float", sample(torch.float32).args, differentiable=False)


def test_what_it_has_not_is_named() -> None:
    with pytest.raises(ValueError, match=r"DoubleFloat: there is no sin of it"):
        DoubleFloat([1.0]).sin()
    with pytest.raises(TypeError, match="DoubleFloat"):
        DoubleFloat(torch.ones(3, dtype=torch.int64))


def test_optimizers_take_it() -> None:
    # a minimum that float32 cannot tell from its neighbours
    target = DoubleFloat(torch.tensor([1 + 2.0**-35], dtype=torch.float64))
    x = DoubleFloat([0.0]).requires_grad_()
    for _ in range(60):
        ((x - target) ** 2).sum().backward()
        with torch.no_grad():
            x -= 0.4 * x.grad
        x.grad = None
    assert abs(x.item() - target.item()) < 2.0**-46
    assert precise.DoubleFloat is DoubleFloat
