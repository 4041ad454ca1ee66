# SPDX-License-Identifier: MIT
"""DoubleFloat: float64 on hardware that has none, as the sum of two float32."""

import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from metalcore import _torch
from metalcore._check import expect_float, refuse
from metalcore._op import Example, Op
from metalcore.ops.precise import double_float_matmul, double_float_trsm
from metalcore.ops.precise._levels import level_number
from metalcore.ops.precise._pairs import joined, pair_dtype, split

forward = Op(
    "double_float(Tensor x, Tensor x_low, Tensor? y, Tensor? y_low, Tensor? z, Tensor? z_low, "
    "str function) -> (Tensor high, Tensor low)",
    batched=True,
    sharding="*, *, *, *, *, * -> *, *",
)
"""A function of pairs of one shape: add, sub, mul, div, fma, sqrt, exp or log."""

_MEANINGS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "fma": lambda x, y, z: x * y + z,
    "sqrt": torch.sqrt,
    "exp": torch.exp,
    "log": torch.log,
}


class DoubleFloat(Tensor):
    """A float64 tensor for devices that have no float64: each number is the sum of two float32,
    `high` and `low`, which has 48 bits and the range of float32.

    It computes with + - * / and comparisons, `fma`, sqrt, exp, log, sum, mean, matmul, and with
    `solve`, `cholesky`, `qr`, `lstsq`, `inv`, `trsm`, `eigh`, `svd` and `pinv` of
    `metalcore.linalg`; torch's own names for these work too. Gradients are DoubleFloats.

    Args:
        x: a tensor of any floating-point type, or numbers; of float64, the upper 48 bits are kept.
        low: what is to be added to `x`, where a number is given in two parts.

    Example:
        >>> x = metalcore.precise.DoubleFloat(torch.tensor([0.1], dtype=torch.float64))
        >>> (x * 3 - x).to(torch.float64)
        tensor([0.2000], dtype=torch.float64)
    """

    high: Tensor
    low: Tensor

    @staticmethod
    def __new__(cls: type["DoubleFloat"], x: Any, low: Any = None) -> "DoubleFloat":
        if low is not None:
            return DoubleFloat(x) + DoubleFloat(low)  # type: ignore[return-value]
        if isinstance(x, DoubleFloat):
            return x
        given = x if isinstance(x, Tensor) else torch.as_tensor(x, dtype=torch.float64)
        expect_float("DoubleFloat", x=given)
        level_number("DoubleFloat", "float64", given)
        found: DoubleFloat = _Split.apply(given)  # type: ignore[no-untyped-call]
        return found

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """As `torch.Tensor.to`. In float64, which a CPU has, it is a tensor like any other; in
        narrower types it is rounded."""
        dtypes = [a for a in (*args, kwargs.get("dtype")) if isinstance(a, torch.dtype)]
        places = [a for a in (*args, kwargs.get("device")) if isinstance(a, (str, torch.device))]
        there = self if not places else super().to(places[0])
        if not dtypes:
            return there
        found: Tensor = _Joined.apply(there, dtypes[0])  # type: ignore[no-untyped-call]
        return found

    def double(self) -> Tensor:
        return self.to(torch.float64)

    def float(self) -> Tensor:
        return self.to(torch.float32)

    def half(self) -> Tensor:
        return self.to(torch.float16)

    def bfloat16(self) -> Tensor:
        return self.to(torch.bfloat16)

    def fma(self, y: Any, z: Any) -> "DoubleFloat":
        """self * y + z, rounded once."""
        return torch.addcmul(DoubleFloat(z), self, DoubleFloat(y))  # type: ignore[return-value]

    def tolist(self) -> Any:
        return self.detach().to("cpu", torch.float64).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.to("cpu", torch.float64).numpy(force=force)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        values = repr(self.detach().to("cpu", torch.float64))
        grad = ", requires_grad=True" if self.requires_grad else ""
        text = re.sub(r",\s+dtype=torch.float64", "", values)[len("tensor(") : -1]
        where = "" if self.device.type == "cpu" else f", device='{self.device}'"
        return f"DoubleFloat({text}{where}{grad})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["high", "low"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: Any, size: Any, stride: Any
    ) -> "DoubleFloat":
        return of_pair(inner["high"], inner["low"])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        instead = _functions().get(func)
        if instead is not None:
            return instead(*args, **(kwargs or {}))
        with _torch.without_functions():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        compute = _kernels().get(func)
        if compute is not None:
            return compute(func, *args, **(kwargs or {}))
        # what torch composes of other functions
        found = func.decompose(*args, **(kwargs or {}))
        if found is NotImplemented:
            name = func.overloadpacket.__name__
            refuse("DoubleFloat", f"there is no {name} of it; use .to(torch.float64) on a CPU")
        return found


def of_pair(high: Tensor, low: Tensor) -> DoubleFloat:
    """A DoubleFloat of parts that do not overlap."""
    x: DoubleFloat = _torch.wrapper(
        DoubleFloat,
        high.shape,
        strides=high.stride(),
        storage_offset=high.storage_offset(),
        dtype=torch.float64,
        device=high.device,
    )
    x.high, x.low = high, low
    return x


def product(A: DoubleFloat, B: DoubleFloat) -> DoubleFloat:
    """A B, for matrices of one batch."""
    pairs = (A.high, A.low, B.high, B.low)
    return of_pair(*double_float_matmul.forward(*pairs, None, None, None, None))


def left(C: DoubleFloat, A: DoubleFloat, B: DoubleFloat, D: DoubleFloat) -> DoubleFloat:
    """C - D - A B, to 48 bits where all of it cancels."""
    pairs = (A.high, A.low, B.high, B.low, C.high, C.low, D.high, D.low)
    return of_pair(*double_float_matmul.forward(*pairs))


def triangular(A: DoubleFloat, B: DoubleFloat, lower: bool) -> DoubleFloat:
    """X with A X = B, for triangular A."""
    return of_pair(*double_float_trsm.forward(A.high, A.low, B.high, B.low, lower))


@cache
def _kernels() -> dict[Any, Callable[..., Any]]:
    """What the dispatcher is asked for, by what it calls that."""
    found: dict[Any, Callable[..., Any]] = import_module(
        "metalcore.ops.precise._double_float_kernels"
    ).KERNELS
    return found


@cache
def _functions() -> dict[Any, Callable[..., Any]]:
    """Functions of torch that are ours for DoubleFloats, gradient and all."""
    found: dict[Any, Callable[..., Any]] = import_module(
        "metalcore.ops.precise._double_float_linalg"
    ).FUNCTIONS
    return found


class _Split(torch.autograd.Function):
    """A plain tensor as a DoubleFloat."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> DoubleFloat:
        ctx.dtype = x.dtype
        if x.dtype == torch.float64:
            return of_pair(*split(x, torch.float32))
        high = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        return of_pair(high, torch.zeros_like(high))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.to(ctx.dtype)


class _Joined(torch.autograd.Function):
    """A DoubleFloat as a plain tensor."""

    @staticmethod
    def forward(ctx: Any, x: DoubleFloat, dtype: torch.dtype) -> Tensor:
        if dtype != torch.float64:
            return x.high.to(dtype, copy=True)
        if x.device.type == "mps":
            refuse("DoubleFloat", 'mps has no float64; use .to("cpu", torch.float64)')
        return joined(x.high, x.low)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return DoubleFloat(dy), None


@forward.reference
def _(
    x: Tensor,
    x_low: Tensor,
    y: Tensor | None,
    y_low: Tensor | None,
    z: Tensor | None,
    z_low: Tensor | None,
    function: str,
) -> tuple[Tensor, Tensor]:
    given = [(x, x_low), (y, y_low), (z, z_low)]
    numbers = [joined(a, b) for a, b in given if a is not None and b is not None]
    return split(_MEANINGS[function](*numbers), x.dtype)


@forward.determines
def _(high: Tensor, low: Tensor) -> tuple[Tensor, ...]:
    return (joined(high, low),)


def _example(function: str, operands: int) -> None:
    @forward.example
    def _(dtype: torch.dtype) -> Example:
        args: list[Any] = []
        for _ in range(operands):
            args += split(torch.rand(3, 33, dtype=torch.float64) + 0.5, pair_dtype(dtype))
        return Example((*args, *[None] * (6 - len(args)), function), reduces_over=1)


for _name in _MEANINGS:
    _example(_name, {"fma": 3, "sqrt": 1, "exp": 1, "log": 1}.get(_name, 2))
