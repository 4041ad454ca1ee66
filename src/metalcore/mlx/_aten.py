# SPDX-License-Identifier: MIT
"""torch's ops in MLX: those that stand between our kernels, and those that say what ours mean.

A graph of `_graph.py` is run node by node; each makes arrays of MLX, none of which is computed yet.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import torch
from torch import fx

from metalcore._check import refuse
from metalcore.mlx import _aten_linalg, _aten_made, _aten_sums
from metalcore.mlx._aten_sums import is_integer, typed
from metalcore.mlx.exchange import from_torch, mlx_dtype

Kernels = Callable[[str, Sequence[Any], Any], Any]

aten = torch.ops.aten
_TABLE: dict[Any, Callable[..., Any]] = {}


def run(graph: fx.GraphModule, arrays: Sequence[mx.array], kernels: Kernels) -> list[mx.array]:
    """What `graph` returns for `arrays`; `kernels(op, args, made)` computes our ops, whose outputs
    are like `made`."""
    values: dict[fx.Node, Any] = {}
    given = iter(arrays)

    def value(a: Any) -> Any:
        if isinstance(a, fx.Node):
            return values[a]
        if isinstance(a, (list, tuple)):
            return type(a)(map(value, a))
        return a

    for node in graph.graph.nodes:
        target = node.target
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = from_torch(getattr(graph, target))
        elif node.op == "output":
            return [value(a) for a in node.args[0]]
        elif target is operator.getitem:
            values[node] = value(node.args[0])[node.args[1]]
        elif target.namespace == "metalcore_kernels":
            name = target.__name__.split(".")[0]
            values[node] = kernels(name, value(node.args), node.meta["val"])
        elif target in _aten_linalg.OURS and not getattr(kernels, "are_meanings", False):
            ours = _aten_linalg.OURS[target]
            values[node] = ours(kernels, node, *value(node.args), **_named(node, value))
        else:
            values[node] = _translated(node)(*value(node.args), **_named(node, value))
    raise AssertionError("a graph ends with its output")


def _named(node: fx.Node, value: Callable[[Any], Any]) -> dict[str, Any]:
    """Without what torch says of memory."""
    dropped = ("device", "pin_memory", "layout", "memory_format")
    return {k: value(v) for k, v in node.kwargs.items() if k not in dropped}


def _translated(node: fx.Node) -> Callable[..., Any]:
    found = _TABLE.get(node.target) or _TABLE.get(getattr(node.target, "overloadpacket", None))
    if found is None:
        refuse("metalcore.mlx", f"{node.target} of torch has no translation")
    return found


def _is(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for target in targets:
            _TABLE[target] = function
        return function

    return add


# Of the same meaning and the same arguments.
_TABLE |= {
    aten.neg: mx.negative,
    aten.abs: mx.abs,
    aten.exp: mx.exp,
    aten.log: mx.log,
    aten.log1p: mx.log1p,
    aten.expm1: mx.expm1,
    aten.sqrt: mx.sqrt,
    aten.rsqrt: mx.rsqrt,
    aten.square: mx.square,
    aten.sign: mx.sign,
    aten.sgn: mx.sign,
    aten.erf: mx.erf,
    aten.tanh: mx.tanh,
    aten.sigmoid: mx.sigmoid,
    aten.reciprocal: mx.reciprocal,
    aten.isnan: mx.isnan,
    aten.isinf: mx.isinf,
    aten.isfinite: mx.isfinite,
    aten.floor: mx.floor,
    aten.ceil: mx.ceil,
    aten.round: mx.round,
    aten.minimum: mx.minimum,
    aten.maximum: mx.maximum,
    aten.mm: mx.matmul,
    aten.bmm: mx.matmul,
    aten.mv: mx.matmul,
    aten.dot: mx.matmul,
    aten.matmul: mx.matmul,
    aten.bitwise_or: mx.bitwise_or,
    aten.bitwise_and: mx.bitwise_and,
    aten.bitwise_xor: mx.bitwise_xor,
    aten.bitwise_not: mx.bitwise_invert,
    aten.bitwise_left_shift: mx.left_shift,
    aten.bitwise_right_shift: mx.right_shift,
    aten.__lshift__: mx.left_shift,
    aten.__rshift__: mx.right_shift,
    aten.__and__: mx.bitwise_and,
    aten.__or__: mx.bitwise_or,
    aten.trunc: lambda x: _trunc(x),
    aten.t: lambda x: x.T,
    aten.xlogy: lambda x, y: mx.where(x == 0, 0, x * mx.log(y)),
    aten.logical_and: mx.logical_and,
    aten.logical_or: mx.logical_or,
    aten.logical_not: mx.logical_not,
    aten.eq: mx.equal,
    aten.ne: mx.not_equal,
    aten.lt: mx.less,
    aten.le: mx.less_equal,
    aten.gt: mx.greater,
    aten.ge: mx.greater_equal,
    aten.where.self: mx.where,
    aten.transpose: mx.swapaxes,
    aten.permute: mx.transpose,
    aten.unsqueeze: mx.expand_dims,
    aten.stack: mx.stack,
    aten.cat: mx.concatenate,
    aten.roll: lambda x, shifts, dims=None: mx.roll(x, shifts, dims or None),
    aten.flip: lambda x, dims: _flip(x, dims),
    aten.squeeze: lambda x, dim=None: _squeeze(x, dim),
    aten.view: lambda x, shape: x.reshape(shape),
    aten.view.dtype: lambda x, dtype: x.view(mlx_dtype(dtype)),
    aten._unsafe_view: lambda x, shape: x.reshape(shape),
    aten.reshape: lambda x, shape: x.reshape(shape),
    aten.triu: lambda x, k=0: mx.triu(x, k),
    aten.tril: lambda x, k=0: mx.tril(x, k),
    aten.gather: lambda x, dim, at: mx.take_along_axis(x, at, dim),
    aten.index_select: lambda x, dim, at: mx.take(x, at, dim),
    aten.embedding: lambda w, at, *_: mx.take(w, at, 0),
    aten.scatter: lambda x, dim, at, v: mx.put_along_axis(x, at, _like(v, x, at.shape), dim),
    aten.cumsum: lambda x, dim, dtype=None: mx.cumsum(typed(x, dtype), dim),
    aten.masked_fill: lambda x, mask, v: mx.where(mask, _like(v, x, ()), x),
    aten.clamp: lambda x, low=None, high=None: mx.clip(x, low, high),
    aten.clamp_min: lambda x, low: mx.maximum(x, low),
    aten.clamp_max: lambda x, high: mx.minimum(x, high),
    aten.addmm: lambda c, a, b, beta=1, alpha=1: beta * c + alpha * (a @ b),
    aten.baddbmm: lambda c, a, b, beta=1, alpha=1: beta * c + alpha * (a @ b),
    aten.linalg_vector_norm: lambda x, ord=2, dim=None, keepdim=False, dtype=None: mx.linalg.norm(
        x, None if ord == 2 else ord, dim, keepdim
    ),
    aten._to_copy: lambda x, dtype=None, **_: typed(x, dtype),
    aten.lift_fresh_copy: lambda x: x,
    aten.copy: lambda x, v, *_: mx.broadcast_to(v.astype(x.dtype), x.shape),
    aten.sort: lambda x, dim=-1, descending=False, **_: _sorted(x, dim, descending),
    aten.argsort: lambda x, dim=-1, descending=False, **_: _sorted(x, dim, descending)[1],
    aten.diag_embed: lambda x, *_: x[..., None] * mx.eye(x.shape[-1], dtype=x.dtype),
    aten.diagonal: lambda x, k=0, a=0, b=1: mx.diagonal(x, k, a, b),
    aten.split: lambda x, size, dim=0: mx.split(x, list(range(size, x.shape[dim], size)), dim),
    aten.split_with_sizes: lambda x, sizes, dim=0: mx.split(x, _ends(sizes), dim),
    aten.unbind: lambda x, dim=0: [mx.take(x, i, dim) for i in range(x.shape[dim])],
    aten.repeat: lambda x, times: mx.tile(x, times),
}  # fmt: skip


@_is(aten.detach, aten.alias, aten.clone, aten.contiguous)
def _same(x: mx.array, **_: Any) -> mx.array:
    return x


@_is(aten._linalg_check_errors)
def _unchecked(*_: Any, **__: Any) -> None:
    """A failure shows as NaN: to raise would mean to wait."""


@_is(aten.add)
def _add(a: Any, b: Any, *, alpha: float = 1) -> mx.array:
    return a + (b if alpha == 1 else alpha * b)


@_is(aten.sub)
def _sub(a: Any, b: Any, *, alpha: float = 1) -> mx.array:
    return a - (b if alpha == 1 else alpha * b)


@_is(aten.rsub)
def _rsub(a: Any, b: Any, alpha: float = 1) -> mx.array:
    return b - (a if alpha == 1 else alpha * a)


@_is(aten.mul)
def _mul(a: Any, b: Any) -> mx.array:
    return a * b


@_is(aten.div)
def _div(a: Any, b: Any, rounding_mode: str | None = None) -> mx.array:
    if rounding_mode is None:
        return a / b
    if rounding_mode == "floor" or is_integer(a):
        return a // b
    return _trunc(a / b)


def _trunc(x: mx.array) -> mx.array:
    return mx.sign(x) * mx.floor(mx.abs(x))


@_is(aten.floor_divide)
def _floor_divide(a: Any, b: Any) -> mx.array:
    return a // b


@_is(aten.remainder)
def _remainder(a: Any, b: Any) -> mx.array:
    return a % b


@_is(aten.pow)
def _pow(a: Any, b: Any) -> mx.array:
    return mx.square(a) if isinstance(b, (int, float)) and b == 2 else mx.power(a, b)


@_is(aten.expand)
def _expand(x: mx.array, shape: Sequence[int], **_: Any) -> mx.array:
    own = (1,) * (len(shape) - x.ndim) + tuple(x.shape)
    return mx.broadcast_to(x, [o if n == -1 else n for n, o in zip(shape, own, strict=True)])


@_is(aten.slice)
def _slice(
    x: mx.array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> mx.array:
    dim %= x.ndim
    cut = slice(*slice(start, end, step).indices(x.shape[dim]))
    return x[(slice(None),) * dim + (cut,)]


@_is(aten.select)
def _select(x: mx.array, dim: int, index: int) -> mx.array:
    return x[(slice(None),) * (dim % x.ndim) + (index,)]


@_is(aten.select_backward)
def _select_backward(g: mx.array, shape: Sequence[int], dim: int, index: int) -> mx.array:
    return _select_scatter(mx.zeros(shape, g.dtype), g, dim, index)


@_is(aten.slice_backward)
def _slice_backward(
    g: mx.array, shape: Sequence[int], dim: int, start: int, end: int, step: int
) -> mx.array:
    return _slice_scatter(mx.zeros(shape, g.dtype), g, dim, start, end, step)


@_is(aten.slice_scatter)
def _slice_scatter(
    x: mx.array, v: mx.array, dim: int = 0, start: int | None = None, end: int | None = None,
    step: int = 1,
) -> mx.array:  # fmt: skip
    start, end, step = slice(start, end, step).indices(x.shape[dim])
    if step != 1:
        refuse("metalcore.mlx", "slices with steps have no translation")
    return mx.slice_update(x, v.astype(x.dtype), mx.array([start]), axes=(dim % x.ndim,))


@_is(aten.select_scatter)
def _select_scatter(x: mx.array, v: mx.array, dim: int, index: int) -> mx.array:
    return _slice_scatter(x, mx.expand_dims(v, dim), dim, index, index + 1)


def _flip(x: mx.array, dims: Sequence[int]) -> mx.array:
    return x[
        tuple(slice(None, None, -1) if d in [k % x.ndim for k in dims] else slice(None)
              for d in range(x.ndim))
    ]  # fmt: skip


def _squeeze(x: mx.array, dim: int | Sequence[int] | None) -> mx.array:
    if dim is None:
        return mx.squeeze(x)
    dims = [dim] if isinstance(dim, int) else dim
    return mx.squeeze(x, [d for d in dims if x.ndim and x.shape[d] == 1])


def _like(v: Any, x: mx.array, shape: Sequence[int]) -> mx.array:
    value = v.astype(x.dtype) if isinstance(v, mx.array) else mx.array(v, x.dtype)
    return mx.broadcast_to(value, shape) if shape else value


def _ends(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]


def _sorted(x: mx.array, dim: int, descending: bool) -> tuple[mx.array, mx.array]:
    order = mx.argsort(-x if descending else x, dim)
    return mx.take_along_axis(x, order, dim), order.astype(mx.int64)


def _index(x: mx.array, indices: Sequence[mx.array | None]) -> mx.array:
    return x[tuple(slice(None) if i is None else i for i in indices)]


def _index_put(
    x: mx.array, indices: Sequence[mx.array | None], v: mx.array, accumulate: bool = False
) -> mx.array:
    at = tuple(slice(None) if i is None else i for i in indices)
    if accumulate:
        return x.at[at].add(v)
    y = mx.array(x)
    y[at] = v
    return y


def _softmax(x: mx.array, dim: int, half_to_float: bool = False) -> mx.array:
    return mx.softmax(x.astype(mx.float32) if half_to_float else x, dim, precise=True)


def _in_float(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Half precisions computed in float32, and rounded once."""

    def computed(x: mx.array, *args: Any, **named: Any) -> mx.array:
        wide = x.astype(mx.float32) if x.dtype in (mx.float16, mx.bfloat16) else x
        return function(wide, *args, **named).astype(x.dtype)

    return computed


@_in_float
def _gelu(x: mx.array, *, approximate: str = "none") -> mx.array:
    if approximate == "tanh":
        return 0.5 * x * (1 + mx.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + mx.erf(x * 0.7071067811865476))


def _pad(x: mx.array, pads: Sequence[int], value: float = 0) -> mx.array:
    pairs = [(pads[2 * i], pads[2 * i + 1]) for i in range(len(pads) // 2)][::-1]
    widths = [(0, 0)] * (x.ndim - len(pairs)) + [(max(a, 0), max(b, 0)) for a, b in pairs]
    cuts = [slice(None)] * (x.ndim - len(pairs))
    cuts += [slice(max(-a, 0), -max(-b, 0) or None) for a, b in pairs]
    return mx.pad(x[tuple(cuts)], widths, constant_values=value)


def _log_sigmoid(x: mx.array) -> tuple[mx.array, mx.array]:
    return mx.minimum(x, 0) - mx.log1p(mx.exp(-mx.abs(x))), x


_TABLE |= {
    **_aten_linalg.TABLE,
    **_aten_made.TABLE,
    **_aten_sums.TABLE,
    aten.index: _index,
    aten.index_put: _index_put,
    aten._softmax: _softmax,
    aten.silu: _in_float(lambda x: x * mx.sigmoid(x)),
    aten.gelu: _gelu,
    aten.constant_pad_nd: _pad,
    aten.log_sigmoid_forward: _log_sigmoid,
    aten.log_sigmoid_backward: lambda g, x, _: g * mx.sigmoid(-x),
}
