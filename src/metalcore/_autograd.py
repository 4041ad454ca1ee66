# SPDX-License-Identifier: MIT
"""One autograd.Function for eager calls, compilers and function transforms, also forward mode."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from metalcore import _torch

Computation = Callable[..., Any]


def differentiable(
    name: str, forward: Computation, save: Computation, backward: Computation, vmap: Computation
) -> Computation:
    """`forward` with a gradient, which torch's graphs call `name`.

    `save(ctx, inputs, output)` keeps what `backward(ctx, *output_grads)` needs; `vmap` is one of
    the rules below. The derivative in forward mode follows from `backward`.
    """

    def computed(*args: Any) -> Any:
        output = forward(*args)
        if not _torch.has_dual_level():
            return output
        # a view of memory that torch has not seen can have no tangent
        return output.clone() if isinstance(output, Tensor) else tuple(o.clone() for o in output)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        save(ctx, inputs, output)
        if _torch.is_transformed() or _torch.has_dual_level():
            kept = [a for a in (*inputs, *as_tuple(output)) if isinstance(a, Tensor)]
            ctx.save_for_forward(*kept)
            ctx.other_inputs = [None if isinstance(a, Tensor) else (a,) for a in inputs]
            ctx.has_one_output = isinstance(output, Tensor)

    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        # torch switches forward mode off here, for transforms further out too; what was kept must
        # not carry the tangents of this one
        with _torch.forward_mode():
            tensors = map(_primal, ctx.saved_tensors)
            inputs = tuple(next(tensors) if a is None else a[0] for a in ctx.other_inputs)
            outputs = tuple(tensors)
            output = outputs[0] if ctx.has_one_output else outputs
            found = _push_forward(save, backward, inputs, output, tangents)
        return found[0] if ctx.has_one_output else found

    body = {
        "forward": staticmethod(computed),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(backward),
        "jvp": staticmethod(jvp),
        "vmap": staticmethod(vmap),
    }
    made: type[Function] = type(name, (Function,), body)
    through_transforms: Computation = made.apply
    directly = _torch.apply_directly(made)

    def apply(*args: Any) -> Any:
        return (through_transforms if _torch.is_transformed() else directly)(*args)

    return apply


def _primal(x: Tensor) -> Tensor:
    return forward_ad.unpack_dual(x, level=0).primal if x.is_floating_point() else x


def as_one_batch(function: Computation) -> Computation:
    """The rule for vmap of a function of batches: one call, with one more batch dimension."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        def batch(a: Any, dim: int | None) -> Any:
            if not isinstance(a, Tensor):
                return a
            return a.expand(info.batch_size, *a.shape) if dim is None else a.movedim(dim, 0)

        outputs = function(*map(batch, args, in_dims))
        return outputs, 0 if isinstance(outputs, Tensor) else (0,) * len(outputs)

    return rule


def one_by_one(function: Computation) -> Computation:
    """The rule for vmap of any function: one call per sample."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        def sample(a: Any, dim: int | None, i: int) -> Any:
            if dim is None or not isinstance(a, Tensor):
                return a
            # without any sample, zeros stand in for one, for the shapes
            return a.select(dim, i) if info.batch_size else a.sum(dim)

        calls = [
            function(*(sample(a, d, i) for a, d in zip(args, in_dims, strict=True)))
            for i in range(max(1, info.batch_size))
        ]
        samples = zip(*map(as_tuple, calls), strict=True)
        outputs = [torch.stack(s)[: info.batch_size] for s in samples]
        if isinstance(calls[0], Tensor):
            return outputs[0], 0
        return tuple(outputs), (0,) * len(outputs)

    return rule


class _Saved:
    """What `save` keeps, outside a Function."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor | None, ...] = ()
        self.constants: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Every gradient is given."""

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        self.constants = outputs


def _push_forward(
    save: Computation,
    backward: Computation,
    inputs: tuple[Any, ...],
    output: Any,
    tangents: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:
    """J t, by a `backward` that computes J^T dy: J t is the gradient of <J^T dy, t> in dy."""
    moved = [i for i, t in enumerate(tangents) if t is not None and inputs[i].is_floating_point()]
    saved = _Saved(tuple(i in moved for i in range(len(inputs))))
    save(saved, inputs, output)
    outputs = as_tuple(output)
    constants = {id(o) for o in saved.constants}
    floats = [i for i, o in enumerate(outputs) if o.is_floating_point() and id(o) not in constants]

    def pulled(*grads: Tensor) -> list[Tensor | None]:
        given = dict(zip(floats, grads, strict=True))
        found = as_tuple(backward(saved, *(given.get(i) for i in range(len(outputs)))))
        return [found[i] for i in moved]

    zeros = [torch.zeros_like(outputs[i]) for i in floats]
    found = pull_back(pulled, zeros, [tangents[i] for i in moved])
    made = dict(zip(floats, found, strict=True))
    return tuple(made.get(i) for i in range(len(outputs)))


def pull_back(
    function: Computation, values: Sequence[Tensor], weights: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """J^T w of `function` at `values`: the gradient of the sum of <output, weight>.

    By a transform of torch.func, which works inside other transforms, also where they have ended.
    """

    def total(*values: Tensor) -> Tensor:
        terms = [
            (o * w).sum()
            for o, w in zip(function(*values), weights, strict=True)
            if o is not None and w is not None and o.is_floating_point()
        ]
        return sum(terms[1:], terms[0]) if terms else values[0].new_zeros(())

    # views, because values that are left from a transform that has ended cannot enter another one
    alive = [v.view_as(v) for v in values]
    found: tuple[Tensor, ...] = torch.func.grad(total, tuple(range(len(alive))))(*alive)
    return found


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    """The outputs of an op, also of one that has a single one."""
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
