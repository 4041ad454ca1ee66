# SPDX-License-Identifier: MIT
"""What a function of torch computes for one kind of arguments, as a graph of ops: its forward pass,
and its backward pass by what the forward one keeps.

metalcore's functions are traced as a compiler does it, without any data. So checks, shapes,
gradients and rules for batches are theirs, and there is one text of each.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from metalcore import _torch
from metalcore._op import Op
from metalcore.metal.plans import Spec

Function = Callable[..., Sequence[Tensor]]


class Graph:
    """A function of tensors like `specs`: `forward` returns its `results` and what it keeps, and
    `backward` takes the tensors, what was kept and a gradient for each float result."""

    def __init__(
        self,
        forward: fx.GraphModule,
        specs: Sequence[Spec],
        results: int,
        backward: fx.GraphModule | None = None,
    ) -> None:
        self.forward, self.specs, self._backward = forward, specs, backward
        self.made = [Spec.of(n.meta["val"]) for n in _output(forward)]
        self.results, self._kept = self.made[:results], self.made[results:]
        self._batched: dict[int, Graph] = {}

    @cached_property
    def backward(self) -> "Graph | None":
        if self._backward is None:
            return None
        gradients = [s for s in self.results if s.dtype.is_floating_point]
        specs = [*self.specs, *self._kept, *gradients]
        return Graph(self._backward, specs, len(_output(self._backward)))

    def batched(self, size: int) -> "Graph":
        """The same for `size` of everything, in a new first dimension."""
        if size not in self._batched:
            specs = _many(size, self.specs)
            backward = None
            if self.backward is not None:
                backward = _every(self.backward.forward, _many(size, self.backward.specs))
            made = _every(self.forward, specs)
            self._batched[size] = Graph(made, specs, len(self.results), backward)
        return self._batched[size]


def _many(size: int, specs: Sequence[Spec]) -> list[Spec]:
    return [Spec.contiguous((size, *s.shape), s.dtype) for s in specs]


class _Ops(fx.Interpreter):
    """Runs a graph with the ops that have rules for batches, where kernels have none."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if getattr(target, "namespace", "") == "metalcore_kernels":
            return Op.all[target.__name__.split(".")[0]](*args)
        return super().call_function(target, args, kwargs)


def _every(graph: fx.GraphModule, specs: Sequence[Spec]) -> fx.GraphModule:
    return trace(lambda *tensors: torch.vmap(_Ops(graph).run)(*tensors), specs)


def trace(function: Function, specs: Sequence[Spec]) -> fx.GraphModule:
    """The graph of `function`, in which no op writes to what it is given."""
    with _torch.as_compilers_see_it():
        tensors = [torch.empty(s.shape, dtype=s.dtype) for s in specs]
        graph = make_fx(function)(*tensors)
        if any(_torch.writes(n.target) for n in graph.graph.nodes):
            graph = make_fx(torch.func.functionalize(graph))(*tensors)
    graph.graph.eliminate_dead_code()
    return graph


def differentiated(function: Function, specs: Sequence[Spec]) -> Graph:
    """The graph of `function` and of its gradients for all float tensors."""
    tensors = list(specs)
    with _torch.as_compilers_see_it(), torch.no_grad():
        made = function(*(torch.empty(s.shape, dtype=s.dtype) for s in tensors))
    results = [Spec.of(t) for t in made]
    wanted = [i for i, s in enumerate(tensors) if s.dtype.is_floating_point]
    tangents = [s for s in results if s.dtype.is_floating_point]

    def both(*values: Tensor) -> list[Tensor]:
        leaves = [
            x.detach().requires_grad_(i in wanted) for i, x in enumerate(values[: len(tensors)])
        ]
        with torch.enable_grad():
            outputs = list(function(*leaves))
            floats = [o for o in outputs if o.is_floating_point()]
            given = zip(floats, values[len(tensors) :], strict=True)
            pairs = [(o, g) for o, g in given if o.requires_grad]
        found = torch.autograd.grad(
            [o for o, _ in pairs], [leaves[i] for i in wanted], [g for _, g in pairs],
            allow_unused=True,
        )  # fmt: skip
        zeros = (torch.zeros_like(leaves[i]) for i in wanted)
        return [*outputs, *(z if g is None else g for g, z in zip(found, zeros, strict=True))]

    whole = trace(both, [*tensors, *tangents])
    return _cut(whole, tensors, results)


def _cut(whole: fx.GraphModule, specs: list[Spec], results: list[Spec]) -> Graph:
    """Forward: all that does not depend on a gradient of a result. Backward: the rest."""
    nodes = list(whole.graph.nodes)
    places = [n for n in nodes if n.op == "placeholder"]
    late = set(places[len(specs) :])
    for n in nodes:
        if any(a in late for a in n.all_input_nodes):
            late.add(n)
    outputs = list(_output(whole))
    own, gradients = outputs[: len(results)], outputs[len(results) :]
    early = [n for n in nodes if n not in late and n.op not in ("placeholder", "output")]
    used = {a for n in nodes if n in late and n.op != "output" for a in n.all_input_nodes}
    used |= {g for g in gradients if g not in late}
    kept = [n for n in early if n in used]
    forward = _part(whole, places[: len(specs)], early, [*own, *kept])
    given = [*places[: len(specs)], *kept, *places[len(specs) :]]
    rest = [n for n in nodes if n in late and n.op not in ("placeholder", "output")]
    return Graph(forward, specs, len(results), _part(whole, given, rest, gradients))


def _part(
    whole: fx.GraphModule, given: list[fx.Node], nodes: list[fx.Node], outputs: list[fx.Node]
) -> fx.GraphModule:
    graph, copies = fx.Graph(), {}
    for n in given:
        copies[n] = graph.placeholder(n.name)
        copies[n].meta = n.meta
    for n in nodes:
        copies[n] = graph.node_copy(n, copies.__getitem__)
    graph.output(tuple(copies[n] for n in outputs))
    graph.eliminate_dead_code()
    return fx.GraphModule(whole, graph)


def _output(graph: fx.GraphModule) -> Sequence[fx.Node]:
    return next(n for n in graph.graph.nodes if n.op == "output").args[0]
