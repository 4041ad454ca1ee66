# SPDX-License-Identifier: MIT
"""Op: one operator of the `metalcore` library and what is attached to it."""

import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from metalcore import _trace
from metalcore._check import forbid_reference

library = torch.library.Library("metalcore", "DEF")

Function = Callable[..., Any]

_BelowAutograd = torch._C._AutoDispatchBelowAutograd
# by their own names: to look them up takes as long as the calls
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_transforms = torch._C._are_functorch_transforms_active

_TENSORS = ("Tensor", "Optional[Tensor]")


class Example(NamedTuple):
    """Arguments of an op, and the number of values that its longest sum adds up."""

    args: tuple[Any, ...]
    reduces_over: int


class Op:
    """An operator: its schema, its gradient, and its reference, which is the fallback, the rule for
    shapes and the truth for tests."""

    all: ClassVar[dict[str, "Op"]] = {}

    def __init__(self, schema: str, *, batched: bool = False) -> None:
        """`batched`: every tensor has the same leading batch dimensions, any number of them."""
        self.name = schema.split("(", 1)[0]
        self.schema = schema
        self._batched = batched
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self._overload = getattr(torch.ops.metalcore, self.name).default
        self._kernel = self._overload._op
        arguments = self._overload._schema.arguments
        self._tensors = [i for i, a in enumerate(arguments) if str(a.type) in _TENSORS]
        self._written = [i for i, a in enumerate(arguments) if a.is_write]
        self._recorded: Any
        self._transformed: Any
        self.meaning: Function
        self.samples: list[Callable[[torch.dtype], Example]] = []
        self.determined: Callable[[tuple[Any, ...]], tuple[Any, ...]] = lambda outputs: outputs
        Op.all[self.name] = self

    def __call__(self, *args: Any) -> Any:
        # Eager calls step around the dispatcher's autograd key, which costs 8 us without a
        # gradient and 26 us with one; compilers and function transforms use what it holds.
        if _is_compiling():
            return self._overload(*args)
        if _transforms():
            return self._transformed.apply(*args)
        if _is_grad_enabled():
            for i in self._tensors:
                a = args[i]
                if a is not None and a.requires_grad:
                    return self._recorded.apply(*args)
        return self._below_autograd(*args)

    def _below_autograd(self, *args: Any) -> Any:
        with _BelowAutograd():
            outputs = self._kernel(*args)
        # what autograd saved of a written argument is void, and it must know
        for i in self._written:
            torch.autograd.graph.increment_version(args[i])
        return outputs

    def reference(self, fn: Function) -> Function:
        """Attach the meaning of the op, in plain torch."""
        self.meaning = fn
        library.impl(self.name, self.run_reference, "CompositeExplicitAutograd")
        return fn

    def run_reference(self, *args: Any) -> Any:
        """Compute the op by its meaning: what happens where no kernel takes it."""
        x = next(_trace.tensors(args))
        if _is_real(x):
            if os.environ.get("METALCORE_STRICT") == "1":
                forbid_reference(self.name, x)
            _trace.note("reference")
        return self.meaning(*args)

    def example(self, fn: Callable[[torch.dtype], Example]) -> Callable[[torch.dtype], Example]:
        """Attach small arguments per dtype, for `doctor` and the table of what runs where.

        An op that has several kernels gets an example for each.
        """
        self.samples.append(fn)
        return fn

    def determines(self, fn: Callable[..., tuple[Any, ...]]) -> Function:
        """Attach what the outputs determine, where they are not unique themselves: `fn(*outputs)`.

        The signs of singular vectors are free, but U S V^T, S and U^T U are not; checks compare
        these in place of the outputs, and gradients pass through them.
        """
        self.determined = lambda outputs: fn(*outputs)
        return fn

    def results(self, outputs: Any, args: Sequence[Any]) -> list[Tensor]:
        """All that a call with `args` determines: by its outputs, then what it wrote to `args`."""
        declared = self._overload._schema.arguments
        written = [a for a, d in zip(args, declared, strict=True) if d.is_write]
        made = self.determined(tuple(_trace.tensors([outputs])))
        return [*made, *_trace.tensors(written)]

    @property
    def story(self) -> str:
        """`<family>/<op>`: the path of the op's files under each root."""
        return "/".join(self.meaning.__module__.split(".")[-2:])

    def gradient(self, save: Function) -> Callable[[Function], Function]:
        """Attach `fn(ctx, *output_grads)`; `save(ctx, inputs, output)` runs after the forward."""

        def attach(fn: Function) -> Function:
            torch.library.register_autograd(
                f"metalcore::{self.name}", fn, setup_context=save, lib=library
            )
            below = self._below_autograd

            class Recorded(torch.autograd.Function):
                @staticmethod
                def forward(ctx: Any, *args: Any) -> Any:
                    output = below(*args)
                    save(ctx, args, output)
                    return output

                backward = staticmethod(fn)

            # Function transforms want the two halves of forward apart, which is three times slower.
            class Transformed(torch.autograd.Function):
                generate_vmap_rule = True
                forward = staticmethod(below)
                setup_context = staticmethod(save)
                backward = staticmethod(fn)

            self._recorded, self._transformed = Recorded, Transformed
            rule = self._as_one_batch if self._batched else self._one_by_one
            torch.library.register_vmap(f"metalcore::{self.name}", rule, lib=library)
            return fn

        return attach

    def _one_by_one(self, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        """The rule for vmap: one call per sample."""

        def sample(a: Any, dim: int | None, i: int) -> Any:
            if dim is None:
                return a
            # without any sample, zeros stand in for one, for the shapes
            return a.select(dim, i) if info.batch_size else a.sum(dim)

        calls = [
            self._below_autograd(*(sample(a, d, i) for a, d in zip(args, in_dims, strict=True)))
            for i in range(max(1, info.batch_size))
        ]
        samples = zip(*map(as_tuple, calls), strict=True)
        outputs = [torch.stack(s)[: info.batch_size] for s in samples]
        if isinstance(calls[0], Tensor):
            return outputs[0], 0
        return tuple(outputs), (0,) * len(outputs)

    def _as_one_batch(self, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        """The rule for vmap where the op takes batches: one call, with one more batch dimension."""

        def batch(a: Any, dim: int | None) -> Any:
            if not isinstance(a, Tensor):
                return a
            return a.expand(info.batch_size, *a.shape) if dim is None else a.movedim(dim, 0)

        outputs = self._below_autograd(*(batch(a, d) for a, d in zip(args, in_dims, strict=True)))
        return outputs, 0 if isinstance(outputs, Tensor) else (0,) * len(outputs)

    def differentiate_reference(self) -> None:
        """Attach the gradient that autograd finds for the reference: for ops off the hot path."""

        def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.save_for_backward(*(a for a in inputs if isinstance(a, Tensor)))
            ctx.rest = [None if isinstance(a, Tensor) else a for a in inputs]
            ctx.is_tensor = [isinstance(a, Tensor) for a in inputs]

        @self.gradient(save=save)
        def _(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            saved = iter(ctx.saved_tensors)
            args = [next(saved) if t else r for t, r in zip(ctx.is_tensor, ctx.rest, strict=True)]
            wanted = [i for i, need in enumerate(ctx.needs_input_grad) if need]
            create_graph = torch.is_grad_enabled()
            with torch.enable_grad():
                # Views, because one input may be computed from another: each counts on its own.
                args = [a.view_as(a) if isinstance(a, Tensor) else a for a in args]
                outputs = as_tuple(self.meaning(*args))
                pairs = [
                    (o, g)
                    for o, g in zip(outputs, grads, strict=True)
                    if g is not None and o.requires_grad
                ]
                found = torch.autograd.grad(
                    [o for o, _ in pairs],
                    [args[i] for i in wanted],
                    [g for _, g in pairs],
                    create_graph=create_graph,
                    allow_unused=True,
                )
            result: list[Tensor | None] = [None] * len(args)
            for i, grad in zip(wanted, found, strict=True):
                result[i] = grad
            return tuple(result)


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    """The outputs of an op, also of one that has a single one."""
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def accumulate(x: Tensor) -> Tensor:
    """`x` in the type sums are kept in: float32, or float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()


def accumulate_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _is_real(x: Tensor) -> bool:
    """Whether `x` has data: fake and meta tensors only ask for shapes."""
    from torch._subclasses.fake_tensor import FakeTensor

    return x.device.type != "meta" and not isinstance(x, FakeTensor)
