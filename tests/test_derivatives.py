# SPDX-License-Identifier: MIT
"""Every op that has a gradient has all of torch's derivatives, of the second order too.

The truth is the reference, differentiated in reverse: forward mode of torch's own functions can be
wrong where it is nested.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fw
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from metalcore._op import Composition, Op

Function = Callable[..., Any]

# Their references read one triangle: where A is not symmetric, that has a derivative of its own.
SYMMETRIC = ("cholesky", "eigh", "eigvalsh")
OPS = [op for op in (*Op.all.values(), *Composition.all.values()) if op.is_differentiable]


class Case:
    """What an op determines, as a function of its floating-point arguments."""

    def __init__(self, op: Composition, args: Sequence[Any], compute: Function) -> None:
        self.op, self.args, self.compute = op, args, compute
        self.at = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point()]
        self.values = tuple(args[i] for i in self.at)
        generator = torch.Generator().manual_seed(1)
        self.directions = tuple(
            torch.randn(v.shape, generator=generator, dtype=v.dtype) for v in self.values
        )

    def loss(self, *values: Tensor) -> Tensor:
        args = list(self.args)
        for i, value in zip(self.at, values, strict=True):
            args[i] = (value + value.mT) / 2 if self.op.name in SYMMETRIC else value
        found = self.op.results(self.compute(*args), args)
        terms = [r.sin().sum() for r in found if r.is_floating_point()]
        return torch.stack(terms).sum()

    def gradient(self, *values: Tensor) -> Any:
        return grad(self.loss, tuple(range(len(values))))(*values)

    def slope(self, *values: Tensor) -> Tensor:
        """The derivative along `directions`, by forward mode."""
        slope: Tensor = jvp(self.loss, values, self.directions)[1]
        return slope

    def slope_of_gradient(self, *values: Tensor) -> Tensor:
        return self.along(self.gradient(*values))

    def along(self, grads: Sequence[Tensor]) -> Tensor:
        terms = [(g * d).sum() for g, d in zip(grads, self.directions, strict=True)]
        return torch.stack(terms).sum()

    def gradient_of(self, function: Function) -> Any:
        return grad(function, tuple(range(len(self.values))))(*self.values)

    def mapped(self, function: Function) -> Any:
        return vmap(function)(*map(torch.stack, zip(*self.samples, strict=True)))

    @property
    def samples(self) -> tuple[tuple[Tensor, ...], ...]:
        pairs = zip(self.values, self.directions, strict=True)
        return self.values, tuple(v * (1 + 1e-3 * d) for v, d in pairs)


def leaves(values: Sequence[Tensor]) -> list[Tensor]:
    return [v.detach().clone().requires_grad_() for v in values]


def of(y: Tensor, x: Sequence[Tensor], create_graph: bool = False) -> tuple[Tensor, ...]:
    return torch.autograd.grad(
        y, x, create_graph=create_graph, allow_unused=True, materialize_grads=True
    )


def backward(case: Case, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x = leaves(values)
    return of(case.loss(*x), x)


def backward_twice(case: Case) -> tuple[Tensor, ...]:
    x = leaves(case.values)
    return of(case.along(of(case.loss(*x), x, create_graph=True)), x)


def backward_with_checkpoint(case: Case) -> tuple[Tensor, ...]:
    x = leaves(case.values)
    return of(checkpoint(case.loss, *x, use_reentrant=False), x)


def tangent_of_dual_numbers(case: Case) -> Tensor | None:
    with fw.dual_level():
        duals = map(fw.make_dual, case.values, case.directions)
        return fw.unpack_dual(case.loss(*duals)).tangent


TRUTHS: dict[str, Callable[[Case], Any]] = {
    "gradient": lambda c: backward(c, c.values),
    "slope": lambda c: c.along(backward(c, c.values)),
    "product": backward_twice,
    "curvature": lambda c: c.along(backward_twice(c)),
    "losses": lambda c: torch.stack([c.loss(*s) for s in c.samples]),
    "gradients": lambda c: tuple(
        map(torch.stack, zip(*(backward(c, s) for s in c.samples), strict=True))
    ),
    "slopes": lambda c: torch.stack([c.along(backward(c, s)) for s in c.samples]),
}

DERIVATIVES: dict[str, tuple[str, Callable[[Case], Any]]] = {
    "backward": ("gradient", lambda c: backward(c, c.values)),
    "checkpoint": ("gradient", backward_with_checkpoint),
    "grad": ("gradient", lambda c: c.gradient(*c.values)),
    "vjp": ("gradient", lambda c: vjp(c.loss, *c.values)[1](torch.ones((), dtype=torch.double))),
    "dual numbers": ("slope", tangent_of_dual_numbers),
    "jvp": ("slope", lambda c: c.slope(*c.values)),
    "vmap": ("losses", lambda c: c.mapped(c.loss)),
    "vmap of grad": ("gradients", lambda c: c.mapped(c.gradient)),
    "vmap of jvp": ("slopes", lambda c: c.mapped(c.slope)),
    "backward twice": ("product", backward_twice),
    "reverse over reverse": ("product", lambda c: c.gradient_of(c.slope_of_gradient)),
    "forward over reverse": ("product", lambda c: jvp(c.gradient, c.values, c.directions)[1]),
    "reverse over forward": ("product", lambda c: c.gradient_of(c.slope)),
    "forward over forward": ("curvature", lambda c: jvp(c.slope, c.values, c.directions)[1]),
}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_op_has_the_derivatives_of_its_reference(op: Composition) -> None:
    # the first example is one at which there are derivatives
    args = op.samples[0](torch.float64).args
    reference = Case(op, args, op.meaning)
    truths = {name: derive(reference) for name, derive in TRUTHS.items()}
    for name, (kind, derive) in DERIVATIVES.items():
        for compute in (op, getattr(torch.ops.metalcore, op.name)):
            found = derive(Case(op, args, compute))
            torch.testing.assert_close(
                found, truths[kind], msg=lambda text, name=name: f"{name}: {text}"
            )
