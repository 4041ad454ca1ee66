# SPDX-License-Identifier: MIT
"""Functions of metalcore on MLX arrays, each made of the one for tensors.

Where there is a GPU, a function is traced once per kind of arguments, and its graph becomes MLX's,
lazily, with Metal kernels in it. On the CPU our kernels compute at once, on the memory of the
arrays, or MLX's own ops where those are ahead (`_own.py`); inside `mx.compile` and `mx.vmap`, where
there is no memory yet, MLX's ops of the same meaning.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import torch
from torch import Tensor

from metalcore._check import refuse_gradient
from metalcore.metal.plans import Spec
from metalcore.mlx import _aten, _ways
from metalcore.mlx._arguments import Filled, Shape, filled
from metalcore.mlx._graph import Graph, differentiated, trace
from metalcore.mlx._own import by_mlx
from metalcore.mlx._simulate import simulated
from metalcore.mlx._vmap import of_a_sample
from metalcore.mlx.exchange import from_torch, mlx_dtype, shared, to_torch, torch_dtype

Kernels = Callable[..., Any]
Stream = Any

# where a call is without a stream
_HERE = nullcontext()


class Function:
    """One function of tensors, for arrays."""

    def __init__(
        self, function: Callable[..., Any], has_gradient: bool = True, is_recorded: bool = True
    ) -> None:
        self._function, self._has_gradient = function, has_gradient
        self._is_recorded = is_recorded
        self._name = f"metalcore.mlx.{function.__name__}"
        self._graphs: dict[Any, tuple[Graph, Shape]] = {}

    def __call__(self, *args: Any, stream: Stream = None, **named: Any) -> Any:
        with _HERE if stream is None else mx.stream(stream):
            kernels = simulated() or (_ways.METAL_WAY if on_gpu(stream) else None)
            if kernels is None:
                found = by_mlx(self._function.__name__, args, named)
                if found is not None:
                    return found
            call = Filled.of(args, named)
            if kernels is None:
                found = self._at_once(call)
                if found is not None:
                    return found
            key = call.key
            if key not in self._graphs:
                self._graphs[key] = self._traced(call)
            graph, shape = self._graphs[key]
            made = _lazily(graph, kernels or _ways.by_meaning, self._name)(*call.arrays)
        return filled(shape, made[: len(graph.results)])

    def _traced(self, call: Filled) -> tuple[Graph, Shape]:
        shapes: list[Shape] = []

        def function(*tensors: Tensor) -> list[Tensor]:
            args, named = call.with_values(tensors)
            outputs, shape = Filled.outputs(self._function(*args, **named))
            shapes.append(shape)
            return outputs

        specs = [Spec.contiguous(a.shape, torch_dtype(a.dtype)) for a in call.arrays]
        if self._has_gradient and any(s.dtype.is_floating_point for s in specs):
            return differentiated(function, specs), shapes[0]
        graph = trace(function, specs)
        return Graph(graph, specs, shapes[0].arrays), shapes[0]

    def _at_once(self, call: Filled) -> Any:
        """By our kernels for the CPU; None where the arrays have no values yet."""
        try:
            mx.eval(call.arrays)
        except ValueError as problem:
            if "during function transformations" in str(problem):
                return None
            raise
        tensors = [shared(a) for a in call.arrays]
        floats = [self._has_gradient and t.is_floating_point() for t in tensors]

        def recorded() -> tuple[list[Tensor], list[Tensor], Shape]:
            leaves = [t.detach().requires_grad_(f) for t, f in zip(tensors, floats, strict=True)]
            with torch.enable_grad():
                return leaves, *self._outputs(call, leaves)

        if self._is_recorded:
            leaves, outputs, shape = recorded()
            has_gradient = any(o.requires_grad for o in outputs)
        else:
            with torch.no_grad():
                outputs, shape = self._outputs(call, tensors)
            has_gradient = any(floats)
        values = [from_torch(o) for o in outputs]
        if not has_gradient:
            return filled(shape, _many(_constant(self._name, values)(*call.arrays)))
        record = (lambda: (leaves, outputs)) if self._is_recorded else (lambda: recorded()[:2])
        return filled(shape, _with_gradient(call.arrays, record, values))

    def _outputs(self, call: Filled, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Shape]:
        args, named = call.with_values(tensors)
        return Filled.outputs(self._function(*args, **named))


def has_metal_kernels() -> bool:
    """Whether functions run Metal kernels here: MLX has a GPU of Apple.

    Returns:
        True or False.

    Example:
        >>> metalcore.mlx.has_metal_kernels()
        False
    """
    return bool(mx.metal.is_available())


def on_gpu(stream: Stream) -> bool:
    """Whether Metal kernels compute what is asked of `stream`."""
    if not has_metal_kernels():
        return False
    device = mx.default_device() if stream is None else getattr(stream, "device", stream)
    return bool(getattr(device, "type", device) == mx.gpu)


def _with_gradient(
    arrays: Sequence[mx.array],
    record: Callable[[], tuple[Sequence[Tensor], Sequence[Tensor]]],
    values: list[mx.array],
) -> list[mx.array]:
    """`values` for MLX's transforms: what torch records, arguments and results, is pulled back
    where it is asked for."""

    @mx.custom_function
    def computed(*_: mx.array) -> list[mx.array]:
        return values

    @computed.vjp
    def pull_back(primals: Any, cotangents: Any, _: Any) -> list[mx.array]:
        leaves, outputs = record()
        wanted = [t for t in leaves if t.requires_grad]
        pairs = [
            (o, to_torch(mx.contiguous(c)))
            for o, c in zip(outputs, cotangents, strict=True)
            if o.requires_grad
        ]
        found = torch.autograd.grad(
            [o for o, _ in pairs], wanted, [c for _, c in pairs],
            allow_unused=True, retain_graph=True,
        )  # fmt: skip
        grads = iter(found)
        return [
            mx.zeros_like(p) if not t.requires_grad or (g := next(grads)) is None else from_torch(g)
            for p, t in zip(_many(primals), leaves, strict=True)
        ]

    return _many(computed(*arrays))


def _constant(name: str, values: list[mx.array]) -> Any:
    """A function whose values are known, and which has no gradient."""

    @mx.custom_function
    def computed(*_: mx.array) -> list[mx.array]:
        return values

    computed.vjp(_refusal(name))
    return computed


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        refuse_gradient(name, "wrap its arguments in mx.stop_gradient")

    return refuse


def _lazily(graph: Graph, kernels: Kernels, name: str) -> Callable[..., list[mx.array]]:
    """`graph` as a function of MLX, with its gradient and its rule for batches."""
    # inside of vmap(), one more argument: what makes MLX ask for the rule
    sample = of_a_sample.get()

    def forward(*arrays: mx.array) -> list[mx.array]:
        if sample is not None:
            return [mx.full(s.shape, math.nan, mlx_dtype(s.dtype)) for s in graph.made]
        return _aten.run(graph.forward, arrays, kernels)

    function = mx.custom_function(forward)
    count = len(graph.specs)

    @function.vmap
    def batched(inputs: Any, axes: Any) -> tuple[list[mx.array], list[int]]:
        arrays, size = _batches(_many(inputs), _many(axes))
        many = _lazily(graph.batched(size), kernels, name)(*arrays[:count])
        return many, [0] * len(many)

    backward, again = graph.backward, f"the gradient of {name}"
    if backward is None:
        function.vjp(_refusal(name))
    else:
        floats = [s.dtype.is_floating_point for s in graph.results]

        @function.vjp
        def pull_back(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
            primals, kept = _many(primals), _many(outputs)[len(floats) :]
            given = [c for c, f in zip(_many(cotangents), floats, strict=False) if f]
            found = iter(_lazily(backward, kernels, again)(*primals[:count], *kept, *given))
            return [
                next(found) if i < count and graph.specs[i].dtype.is_floating_point
                else mx.zeros_like(p)
                for i, p in enumerate(primals)
            ]  # fmt: skip

    extra = () if sample is None else (sample,)
    return lambda *arrays: _many(function(*arrays, *extra))


def _batches(arrays: list[mx.array], axes: list[int | None]) -> tuple[list[mx.array], int]:
    size = next(x.shape[a] for x, a in zip(arrays, axes, strict=True) if a is not None)
    return [
        mx.broadcast_to(x, (size, *x.shape)) if a is None else mx.moveaxis(x, a, 0)
        for x, a in zip(arrays, axes, strict=True)
    ], size


def _many(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple)) else [values]


def signature_of(
    function: Callable[..., Any], renamed: dict[str, str], left_out: Sequence[str] = ()
) -> inspect.Signature:
    """That of `function`, in MLX's words, with a stream and without what is left out."""
    own = inspect.signature(function)
    parameters = [
        p.replace(name=renamed.get(p.name, p.name), annotation=inspect.Parameter.empty)
        for p in own.parameters.values()
        if p.name not in left_out
    ]
    stream = inspect.Parameter("stream", inspect.Parameter.KEYWORD_ONLY, default=None)
    return inspect.Signature([*parameters, stream])
