# SPDX-License-Identifier: MIT
"""What torch's dispatcher asks of DoubleFloats: their gradients are torch's own formulas."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from metalcore._check import refuse
from metalcore.ops.precise import double_float
from metalcore.ops.precise._pairs import split
from metalcore.ops.precise.double_float import DoubleFloat, of_pair

_aten = torch.ops.aten
Kernel = Callable[..., Any]

KERNELS: dict[Any, Kernel] = {}
"""By the overload of torch's op that each of them computes; it is their first argument."""


def _computes(*overloads: Any) -> Callable[[Kernel], Kernel]:
    def register(kernel: Kernel) -> Kernel:
        KERNELS.update(dict.fromkeys(overloads, kernel))
        return kernel

    return register


def _as_pair(x: Any, like: DoubleFloat) -> tuple[Tensor, Tensor]:
    """A number, a plain tensor or a DoubleFloat as two tensors on the device of `like`."""
    if isinstance(x, DoubleFloat):
        return x.high, x.low
    wide = torch.as_tensor(x, dtype=torch.float64) if not isinstance(x, Tensor) else x
    high, low = (
        split(wide.double(), torch.float32)
        if wide.device.type != "mps"
        else (
            wide.float(),
            torch.zeros_like(wide, dtype=torch.float32),
        )
    )
    return high.to(like.device), low.to(like.device)


def _first(*values: Any) -> DoubleFloat:
    return next(v for v in values if isinstance(v, DoubleFloat))


def _compute(function: str, *values: Any) -> DoubleFloat:
    """`function` of numbers and tensors that broadcast."""
    like = _first(*values)
    pairs = [part for v in values for part in _as_pair(v, like)]
    args: list[Tensor | None] = list(torch.broadcast_tensors(*pairs))
    return of_pair(*double_float.forward(*args, *[None] * (6 - len(args)), function))


def _scaled(x: Any, factor: Any) -> Any:
    return x if factor == 1 else _compute("mul", x, factor) if isinstance(x, Tensor) else x * factor


@_computes(_aten.add.Tensor, _aten.add.Scalar)
def _(_: Any, x: Any, y: Any, alpha: Any = 1) -> DoubleFloat:
    return _compute("add", x, _scaled(y, alpha))


@_computes(_aten.sub.Tensor, _aten.sub.Scalar)
def _(_: Any, x: Any, y: Any, alpha: Any = 1) -> DoubleFloat:
    return _compute("sub", x, _scaled(y, alpha))


@_computes(_aten.rsub.Tensor, _aten.rsub.Scalar)
def _(_: Any, x: Any, y: Any, alpha: Any = 1) -> DoubleFloat:
    return _compute("sub", y, _scaled(x, alpha))


@_computes(_aten.mul.Tensor, _aten.mul.Scalar)
def _(_: Any, x: Any, y: Any) -> DoubleFloat:
    return _compute("mul", x, y)


@_computes(_aten.div.Tensor, _aten.div.Scalar)
def _(_: Any, x: Any, y: Any) -> DoubleFloat:
    return _compute("div", x, y)


@_computes(_aten.reciprocal.default)
def _(_: Any, x: DoubleFloat) -> DoubleFloat:
    return _compute("div", 1.0, x)


@_computes(_aten.sqrt.default, _aten.exp.default, _aten.log.default)
def _(func: Any, x: DoubleFloat) -> DoubleFloat:
    return _compute(func.overloadpacket.__name__, x)


@_computes(_aten.rsqrt.default)
def _(_: Any, x: DoubleFloat) -> DoubleFloat:
    return _compute("div", 1.0, _compute("sqrt", x))


@_computes(_aten.addcmul.default)
def _(_: Any, x: Any, y: Any, z: Any, value: Any = 1) -> DoubleFloat:
    return _compute("fma", _scaled(y, value), z, x)


@_computes(_aten.pow.Tensor_Scalar)
def _(_: Any, x: DoubleFloat, exponent: float) -> DoubleFloat:
    times, is_half = abs(exponent), abs(exponent) % 1 == 0.5
    if times % 1 not in (0, 0.5):
        return _compute("exp", _compute("mul", exponent, _compute("log", x)))
    ones = of_pair(torch.ones_like(x.high), torch.zeros_like(x.low))
    result = _compute("sqrt", x) if is_half else ones
    square = x
    for bit in reversed(bin(int(times))[2:]):
        result = _compute("mul", result, square) if bit == "1" else result
        square = _compute("mul", square, square)
    return _compute("div", 1.0, result) if exponent < 0 else result


_IN_PLACE = ("add_.Tensor", "sub_.Tensor", "mul_.Tensor", "div_.Tensor", "copy_.default")


@_computes(*(getattr(getattr(_aten, n.split(".")[0]), n.split(".")[1]) for n in _IN_PLACE))
def _(func: Any, x: DoubleFloat, y: Any, *more: Any, **options: Any) -> DoubleFloat:
    name = func.overloadpacket.__name__.removesuffix("_")
    result = y if name == "copy" else KERNELS[getattr(_aten, name).Tensor](None, x, y, **options)
    high, low = _as_pair(result, x)
    x.high.copy_(high)
    x.low.copy_(low)
    return x


@_computes(_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor)
def _(_: Any, x: DoubleFloat, value: Any = 0.0) -> DoubleFloat:
    high, low = _as_pair(value, x)
    x.high.copy_(high)
    x.low.copy_(low)
    return x


# Signs and comparisons: high parts decide, and low ones where these are equal.


@_computes(_aten.abs.default)
def _(_: Any, x: DoubleFloat) -> DoubleFloat:
    is_negative = x.high.signbit()
    return of_pair(x.high.abs(), torch.where(is_negative, -x.low, x.low))


@_computes(_aten.sgn.default, _aten.sign.default)
def _(_: Any, x: DoubleFloat) -> DoubleFloat:
    return of_pair(x.high.sign(), torch.zeros_like(x.low))


def _comparison(name: str, on_high: Callable[..., Tensor], on_low: Callable[..., Tensor]) -> None:
    packet = getattr(_aten, name)

    @_computes(packet.Tensor, packet.Scalar)
    def _(_: Any, x: Any, y: Any) -> Tensor:
        like = _first(x, y)
        (high, low), (other, other_low) = _as_pair(x, like), _as_pair(y, like)
        return on_high(high, other) | ((high == other) & on_low(low, other_low))


for _name, _on_high, _on_low in (
    ("lt", torch.lt, torch.lt),
    ("le", torch.lt, torch.le),
    ("gt", torch.gt, torch.gt),
    ("ge", torch.gt, torch.ge),
    ("ne", torch.ne, torch.ne),
):
    _comparison(_name, _on_high, _on_low)


@_computes(_aten.eq.Tensor, _aten.eq.Scalar)
def _(_: Any, x: Any, y: Any) -> Tensor:
    like = _first(x, y)
    (high, low), (other, other_low) = _as_pair(x, like), _as_pair(y, like)
    return (high == other) & (low == other_low)


@_computes(_aten.equal.default)
def _(_: Any, x: Any, y: Any) -> bool:
    return x.shape == y.shape and bool((x == y).all())


@_computes(_aten.isnan.default, _aten.isinf.default)
def _(func: Any, x: DoubleFloat) -> Tensor:
    found: Tensor = func(x.high)
    return found


@_computes(_aten.maximum.default, _aten.minimum.default)
def _(func: Any, x: Any, y: Any) -> Any:
    is_more = x >= y if func is _aten.maximum.default else x <= y
    return torch.where(is_more | (x != x), x, y)


@_computes(_aten.where.self)
def _(_: Any, condition: Tensor, x: Any, y: Any) -> DoubleFloat:
    like = _first(x, y)
    (high, low), (other, other_low) = _as_pair(x, like), _as_pair(y, like)
    return of_pair(torch.where(condition, high, other), torch.where(condition, low, other_low))


@_computes(_aten.masked_fill.Scalar, _aten.masked_fill.Tensor)
def _(_: Any, x: DoubleFloat, mask: Tensor, value: Any) -> DoubleFloat:
    high, low = _as_pair(value, x)
    return of_pair(torch.where(mask, high, x.high), torch.where(mask, low, x.low))


@_computes(_aten.amax.default, _aten.amin.default)
def _(func: Any, x: DoubleFloat, dim: Sequence[int] = (), keepdim: bool = False) -> DoubleFloat:
    dims = list(dim) or list(range(x.dim()))
    high: Tensor = func(x.high, dims, True)
    worst = -torch.inf if func is _aten.amax.default else torch.inf
    low: Tensor = func(torch.where(x.high == high, x.low, worst), dims, True)
    # of NaN, nothing is equal
    found = of_pair(high, torch.where(high.isfinite(), low, 0))
    return found if keepdim else found.squeeze(dims)  # type: ignore[return-value]


# Sums, pairs of halves at a time; products.


@_computes(_aten.sum.default, _aten.sum.dim_IntList)
def _(
    _: Any, x: DoubleFloat, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> DoubleFloat:
    dims = sorted(d % max(1, x.dim()) for d in (dim or range(x.dim())))
    kept = [d for d in range(x.dim()) if d not in dims]
    order = [*kept, *dims]
    sizes = [x.shape[d] for d in kept]
    flat = [
        p.permute(order).reshape(*sizes, prod(x.shape[d] for d in dims)) for p in (x.high, x.low)
    ]
    if flat[0].shape[-1] == 0:
        flat = [p.new_zeros(*sizes, 1) for p in flat]
    rows = of_pair(flat[0], flat[1])
    while (n := rows.shape[-1]) > 1:
        half = n // 2
        both = _compute("add", _narrow(rows, 0, half), _narrow(rows, half, half))
        rows = both if n % 2 == 0 else _joined_rows(both, _narrow(rows, n - 1, 1))
    sizes = [1 if d in dims else n for d, n in enumerate(x.shape)] if keepdim else sizes
    return of_pair(rows.high.reshape(sizes), rows.low.reshape(sizes))


def _narrow(x: DoubleFloat, first: int, count: int) -> DoubleFloat:
    return of_pair(x.high.narrow(-1, first, count), x.low.narrow(-1, first, count))


def _joined_rows(x: DoubleFloat, y: DoubleFloat) -> DoubleFloat:
    return of_pair(torch.cat((x.high, y.high), -1), torch.cat((x.low, y.low), -1))


@_computes(_aten.mean.default, _aten.mean.dim)
def _(func: Any, x: DoubleFloat, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    total = KERNELS[_aten.sum.dim_IntList](None, x, dim, keepdim)
    return _compute("div", total, float(x.numel() / max(1, total.numel())))


def _multiplied(A: Any, B: Any) -> DoubleFloat:
    like = _first(A, B)
    return double_float.product(of_pair(*_as_pair(A, like)), of_pair(*_as_pair(B, like)))


@_computes(_aten.mm.default, _aten.bmm.default)
def _(_: Any, A: Any, B: Any, *dtype: Any) -> DoubleFloat:
    return _multiplied(A, B)


@_computes(_aten.mv.default)
def _(_: Any, A: Any, x: Any) -> Any:
    return _multiplied(A, x.unsqueeze(-1)).squeeze(-1)


@_computes(_aten.dot.default)
def _(_: Any, x: Any, y: Any) -> Any:
    return _compute("mul", x, y).sum()


@_computes(_aten.addmm.default, _aten.baddbmm.default)
def _(_: Any, C: Any, A: Any, B: Any, beta: Any = 1, alpha: Any = 1) -> DoubleFloat:
    return _compute("add", _scaled(C, beta), _scaled(_multiplied(A, B), alpha))


# What moves numbers about does so with both parts.

_MOVES = (
    "view.default, _unsafe_view.default, _reshape_alias.default, expand.default, permute.default, "
    "transpose.int, t.default, unsqueeze.default, squeeze.default, squeeze.dim, squeeze.dims, "
    "select.int, slice.Tensor, clone.default, detach.default, alias.default, neg.default, "
    "as_strided.default, diagonal.default, tril.default, triu.default, flip.default, roll.default, "
    "gather.default, index_select.default, index.Tensor, repeat.default, unfold.default, "
    "select_backward.default, slice_backward.default, diagonal_backward.default, "
    "diag_embed.default, new_zeros.default, zeros_like.default, new_empty.default, "
    "empty_like.default, new_empty_strided.default, trace.default, index_put.default"
)
_LISTS = "split.Tensor, split_with_sizes.default, unbind.int, unsafe_split.Tensor"


def _overloads(names: str) -> list[Any]:
    pairs = (name.split(".") for name in names.split(", "))
    return [getattr(getattr(_aten, packet), overload) for packet, overload in pairs]


def _parts(values: Any, part: str) -> Any:
    if isinstance(values, (list, tuple)):
        return type(values)(_parts(v, part) for v in values)
    return getattr(values, part) if isinstance(values, DoubleFloat) else values


def _moved(func: Any, args: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    if options.get("dtype") == torch.float64:
        options = {**options, "dtype": torch.float32}
    return func(*_parts(args, "high"), **options), func(*_parts(args, "low"), **options)


@_computes(*_overloads(_MOVES))
def _(func: Any, *args: Any, **options: Any) -> Any:
    if options.get("dtype") not in (None, torch.float64):
        return func(args[0].high, *args[1:], **options)
    return of_pair(*_moved(func, args, options))


@_computes(*_overloads(_LISTS))
def _(func: Any, *args: Any, **options: Any) -> list[DoubleFloat]:
    return [of_pair(*parts) for parts in zip(*_moved(func, args, options), strict=True)]


@_computes(_aten.cat.default, _aten.stack.default)
def _(func: Any, tensors: Any, dim: int = 0) -> DoubleFloat:
    pairs = [_as_pair(t, _first(*tensors)) for t in tensors]
    highs, lows = zip(*pairs, strict=True)
    return of_pair(func(highs, dim), func(lows, dim))


@_computes(_aten.ones_like.default, _aten.full_like.default, _aten.new_full.default)
def _(func: Any, x: DoubleFloat, *args: Any, **options: Any) -> DoubleFloat:
    size = args[0] if func is _aten.new_full.default else x.shape
    high, low = _as_pair(1.0 if func is _aten.ones_like.default else args[-1], x)
    return of_pair(high.expand(size).clone(), low.expand(size).clone())


@_computes(_aten._to_copy.default)
def _(func: Any, x: DoubleFloat, **options: Any) -> Any:
    if options.pop("dtype", None) not in (None, torch.float64):
        refuse("DoubleFloat", "it is rounded by its own method: x.to(torch.float32)")
    if torch.device(options.get("device") or x.device).type == "meta":
        # a shape without parts, which torch asks what would come of
        return torch.empty(x.shape, dtype=torch.float64, device="meta")
    return of_pair(func(x.high, **options), func(x.low, **options))


@_computes(_aten._local_scalar_dense.default)
def _(_: Any, x: DoubleFloat) -> float:
    return float(x.high.item()) + float(x.low.item())


@_computes(_aten.is_same_size.default)
def _(_: Any, x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape
