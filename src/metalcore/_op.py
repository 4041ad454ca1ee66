# SPDX-License-Identifier: MIT
"""Op: one operator of the `metalcore` library and what is attached to it.

Each has two names in torch's dispatcher. `metalcore::rms_norm` is what users and compilers call: a
composition of the kernel and its gradient, or its meaning where `_route.py` prefers a compiler.
`metalcore_kernels::rms_norm` is the kernel, which knows of no gradient; it is what a compiled graph
runs.
"""

import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from metalcore import _torch, _trace
from metalcore._autograd import as_one_batch, as_tuple, differentiable, one_by_one, pull_back
from metalcore._check import forbid_reference, refuse_gradient, refuse_tangents
from metalcore._lazy import Registry, define
from metalcore._route import is_left_to_compiler
from metalcore._sharding import Rule, Sharding, are_sharded

library = torch.library.Library("metalcore_kernels", "DEF")
"""Where kernels are registered."""
_public = torch.library.Library("metalcore", "DEF")

Function = Callable[..., Any]

# by their own names: to look them up takes as long as the calls
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_transformed, _has_dual_level = _torch.is_transformed, _torch.has_dual_level

_TENSORS = ("Tensor", "Optional[Tensor]")
_TAGS = (torch.Tag.pt2_compliant_tag,)


class Example(NamedTuple):
    """Arguments of an op, and the number of values that its longest sum adds up."""

    args: tuple[Any, ...]
    reduces_over: int


class Composition:
    """A function with a gradient of its own, computed by ops: its schema, meaning and examples."""

    all: ClassVar[Registry["Composition"]] = Registry()

    def __init__(self, schema: str, *, batched: bool = False, sharding: Rule | None = None) -> None:
        """`batched`: every tensor has the same leading batch dimensions, any number of them.
        `sharding`: of which dimensions processes may have parts (`_sharding.py`); without it, that
        is for the ops to say that it is composed of."""
        self.name = schema.split("(", 1)[0]
        self.schema = schema
        self._vmap = (as_one_batch if batched else one_by_one)(self)
        self._overload = define(_public, schema, tags=_TAGS)
        _public.impl(self.name, self._dispatched, "CompositeImplicitAutograd")
        # before what a function transform does to an op
        _public.impl(self.name, self._call, "FuncTorchDynamicLayerFrontMode")
        self.arguments = self._overload._schema.arguments
        self._has_lists = any(str(a.type) == "List[Tensor]" for a in self.arguments)
        self._tensors = [i for i, a in enumerate(self.arguments) if str(a.type) in _TENSORS]
        written = [i for i, a in enumerate(self.arguments) if a.is_write]
        results = len(self._overload._schema.returns)
        self.sharding = (
            None
            if sharding is None
            else Sharding(self.name, sharding, self._tensors, written, results)
        )
        self._compute: Function
        self._recorded: Function = self._refuse_to_record
        self.meaning: Function
        self.samples: list[Callable[[torch.dtype], Example]] = []
        self.determined: Callable[[tuple[Any, ...]], tuple[Any, ...]] = lambda outputs: outputs
        self.all.add(self.name, self)

    def __call__(self, *args: Any) -> Any:
        return self._overload(*args) if _is_compiling() else self._call(*args)

    def _dispatched(self, *args: Any) -> Any:
        if is_left_to_compiler(self.name, args):
            return self.meaning(*args)
        return self._call(*args)

    def _call(self, *args: Any) -> Any:
        if are_sharded(args) and self.sharding is not None:
            return self.sharding.compute(self._call, args)
        if _is_transformed() or _has_dual_level():
            return self._recorded(*args)
        if _is_grad_enabled():
            if self._has_lists:
                return self._recorded(*args)
            for i in self._tensors:
                a = args[i]
                if a is not None and a.requires_grad:
                    return self._recorded(*args)
        return self._compute(*args)

    def _refuse_to_record(self, *args: Any) -> Any:
        """Where no gradient is attached: one that is wanted is not left out in silence."""
        tensors = list(_trace.tensors(args))
        refuse_tangents(self.name, tensors)
        if _is_grad_enabled() and any(t.requires_grad for t in tensors):
            refuse_gradient(self.name)
        return self._compute(*args)

    def forward(self, fn: Function) -> Function:
        """Attach how it is computed."""
        self._compute = fn
        return fn

    def reference(self, fn: Function) -> Function:
        """Attach the meaning, in plain torch."""
        self.meaning = fn
        return fn

    def example(self, fn: Callable[[torch.dtype], Example]) -> Callable[[torch.dtype], Example]:
        """Attach small arguments per dtype, for `doctor` and the table of what runs where.

        An op that has several kernels gets an example for each; the first has all derivatives.
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
        written = [a for a, d in zip(args, self.arguments, strict=True) if d.is_write]
        made = self.determined(tuple(_trace.tensors([outputs])))
        return [*made, *_trace.tensors(written)]

    @property
    def story(self) -> str:
        """`<family>/<op>`: the path of the op's files under each root."""
        return "/".join(self.meaning.__module__.split(".")[-2:])

    @property
    def is_differentiable(self) -> bool:
        return self._recorded != self._refuse_to_record

    def gradient(self, save: Function) -> Callable[[Function], Function]:
        """Attach `fn(ctx, *output_grads)`; `save(ctx, inputs, output)` runs after the forward."""

        def attach(fn: Function) -> Function:
            self._recorded = differentiable(self.name, self._compute, save, fn, self._vmap)
            return fn

        return attach

    def differentiate_reference(self) -> None:
        """Attach the gradient that autograd finds for the reference: for ops off the hot path."""

        def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.save_for_backward(*(inputs[i] for i in self._tensors))
            ctx.others = [None if isinstance(a, Tensor) else a for a in inputs]

        @self.gradient(save=save)
        def _(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            tensors = zip(self._tensors, ctx.saved_tensors, strict=True)
            args = dict(enumerate(ctx.others)) | dict(tensors)
            wanted = [i for i in args if ctx.needs_input_grad[i]]

            def meaning(*values: Tensor) -> tuple[Any, ...]:
                given = args | dict(zip(wanted, values, strict=True))
                return as_tuple(self.meaning(*given.values()))

            found = pull_back(meaning, [args[i] for i in wanted], grads)
            return tuple(dict(zip(wanted, found, strict=True)).get(i) for i in args)


class Op(Composition):
    """An operator with kernels. Its reference is the fallback, the rule for shapes and the truth
    for tests."""

    all: ClassVar[Registry["Op"]] = Registry()  # type: ignore[assignment]

    def __init__(self, schema: str, *, batched: bool = False, sharding: Rule = "") -> None:
        """`sharding`: as for a Composition; without it, tensors that are sharded are gathered."""
        super().__init__(schema, batched=batched, sharding=sharding)
        kernel = define(library, schema, tags=_TAGS)._op
        written = [i for i, a in enumerate(self.arguments) if a.is_write]

        def write(*args: Any) -> Any:
            outputs = kernel(*args)
            # what autograd saved of a written argument is void, and it must know
            for i in written:
                if args[i] is not None:
                    torch.autograd.graph.increment_version(args[i])
            return outputs

        self._compute = write if written else kernel

    def reference(self, fn: Function) -> Function:
        library.impl(self.name, self.run_reference, "CompositeExplicitAutograd")
        library.impl(self.name, self._on_gpu, "MPS")
        return super().reference(fn)

    def _on_gpu(self, *args: Any) -> Any:
        return _metal().on_gpu(self.name, args)

    def run_reference(self, *args: Any) -> Any:
        """Compute the op by its meaning: what happens where no kernel takes it."""
        x = next(_trace.tensors(args))
        if os.environ.get("METALCORE_STRICT") == "1" and has_data(x):
            forbid_reference(self.name, x)
        _trace.note("reference")
        return self.meaning(*args)


@cache
def _metal() -> Any:
    """A layer above this one, loaded where there is a GPU."""
    return import_module("metalcore.metal.run")


def accumulate(x: Tensor) -> Tensor:
    """`x` in the type sums are kept in: float32, or float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()


def accumulate_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def has_data(x: Tensor) -> bool:
    """Whether `x` has data: fake and meta tensors only ask for shapes."""
    return x.device.type != "meta" and not _torch.is_fake(x)
