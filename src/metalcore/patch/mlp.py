# SPDX-License-Identifier: MIT
"""Feed-forward layers: `act(gate(x)) * up(x)` becomes `swiglu` or `geglu`, `act` alone `gelu`.

The linear layers stay the user's modules, so adapters, quantized weights and hooks keep working.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metalcore.ops.train.geglu import geglu
from metalcore.ops.train.gelu import gelu
from metalcore.ops.train.silu import silu
from metalcore.ops.train.swiglu import swiglu
from metalcore.patch.probe import DTYPES, agrees, ask, stand_in
from metalcore.patch.swap import Swapped, restore, swap

# of a probe: width, and width within
_H, _I = 6, 10
# of its inputs: some layers cut off large values
_SCALES = (3.0, 100.0)

PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": swiglu,
    "gelu": geglu,
    "gelu_tanh": lambda gate, up: geglu(gate, up, "tanh"),
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, "tanh"),
}
OP = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu"}


class How(NamedTuple):
    """Names of the parts and of the activation; `up` is None where `gate` holds both, or where
    there is no product."""

    gate: str
    up: str | None
    down: str
    act: str


class _MLP(Swapped):
    """A layer of one argument, x."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return self.compute(self.origin.how, *args)

    def compute(self, how: How, x: Tensor) -> Any:
        raise NotImplementedError


class GatedMLP(_MLP):
    """down(act(gate(x)) * up(x))"""

    def compute(self, how: How, x: Tensor) -> Any:
        parts: Any = self
        gate, up = getattr(parts, how.gate)(x), getattr(parts, str(how.up))(x)
        return getattr(parts, how.down)(PRODUCTS[how.act](gate, up))


class FusedGatedMLP(_MLP):
    """down(act(gate) * up), where gate and up are the halves of one linear layer"""

    def compute(self, how: How, x: Tensor) -> Any:
        parts: Any = self
        gate, up = getattr(parts, how.gate)(x).chunk(2, dim=-1)
        return getattr(parts, how.down)(PRODUCTS[how.act](gate, up))


class PlainMLP(_MLP):
    """down(act(gate(x)))"""

    def compute(self, how: How, x: Tensor) -> Any:
        parts: Any = self
        return getattr(parts, how.down)(ACTIVATIONS[how.act](getattr(parts, how.gate)(x)))


class Experts(Swapped):
    """act(gate) * up of the experts of a layer, where transformers computes it apart"""

    def _apply_gate(self, gate_up_out: Tensor) -> Tensor:
        gate, up = gate_up_out.chunk(2, dim=-1)
        return PRODUCTS[self.origin.how](gate, up)


KINDS = (GatedMLP, FusedGatedMLP, PlainMLP, Experts)


def _linears(module: nn.Module) -> dict[str, nn.Module]:
    """The parts that are linear layers by their attributes, whoever implements them."""
    return {
        name: child
        for name, child in module.named_children()
        if isinstance(getattr(child, "in_features", None), int)
        and isinstance(getattr(child, "out_features", None), int)
    }


def is_candidate(module: nn.Module) -> bool:
    """Two or three linear layers, perhaps an activation, nothing else; or stacked experts."""
    if hasattr(module, "_apply_gate"):
        return True
    linears = _linears(module)
    others = [c for name, c in module.named_children() if name not in linears]
    return (
        len(linears) in (2, 3)
        and len(others) <= 1
        and not any(list(c.parameters()) for c in others)
        and not list(module.parameters(recurse=False))
        and _takes_x_alone(module)
    )


def _takes_x_alone(module: nn.Module) -> bool:
    own = module.origin.base if isinstance(module, Swapped) else type(module)
    return len(inspect.signature(own.forward).parameters) == 2


def recognise(module: nn.Module) -> tuple[type[Swapped], Any] | str:
    """The kind and variant that compute what `module` does, or why there is none."""
    if "forward" in vars(module):
        return "its forward was replaced already"
    if hasattr(module, "_apply_gate"):
        return _experts(module)
    for kind, how, sizes in _guesses(module):
        answers = ask(partial(_answers, module, sizes))
        if answers and _agree(kind, how, answers):
            return kind, how
    return "computes no product or activation that metalcore has"


def _guesses(module: nn.Module) -> Iterator[tuple[type[Swapped], How, dict[str, tuple[int, int]]]]:
    linears = _linears(module)
    for act in PRODUCTS:
        for names in permutations(linears):
            if len(names) == 3:
                gate, up, down = names
                sizes = {gate: (_H, _I), up: (_H, _I), down: (_I, _H)}
                yield GatedMLP, How(gate, up, down, act), sizes
            else:
                gate, down = names
                first, last = linears[gate].out_features, linears[down].in_features
                if first == 2 * last:  # type: ignore[operator]
                    sizes = {gate: (_H, 2 * _I), down: (_I, _H)}
                    yield FusedGatedMLP, How(gate, None, down, act), sizes
                elif first == last:
                    sizes = {gate: (_H, _I), down: (_I, _H)}
                    yield PlainMLP, How(gate, None, down, act), sizes


def _answers(
    module: nn.Module, sizes: dict[str, tuple[int, int]]
) -> list[tuple[nn.Module, Tensor, Tensor]]:
    """Stand-ins with small linear layers, their inputs, and their outputs."""
    answers = []
    for dtype in DTYPES:
        parts = {name: nn.Linear(*size, dtype=dtype) for name, size in sizes.items()}
        for training, scale in product((False, True), _SCALES):
            probe = stand_in(module, modules=parts)
            probe.training = training
            x = (scale * torch.randn(2, 3, _H)).to(dtype)
            answers.append((probe, x, probe.forward(x)))
    return answers


def _agree(kind: type[Swapped], how: How, answers: list[tuple[nn.Module, Tensor, Tensor]]) -> bool:
    same = True
    for probe, x, theirs in answers:
        swap(probe, kind, how)
        with torch.no_grad():
            same = same and agrees(OP[how.act], (theirs,), (probe.forward(x),), _I)
        restore(probe)
    return same


def _experts(module: Any) -> tuple[type[Swapped], str] | str:
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if implementation not in ("grouped_mm", "batched_mm"):
        return f"experts_implementation={implementation!r} computes the product within its loop"
    inputs = [
        (scale * torch.linspace(-1.5, 2, 2 * _I)).to(dtype)
        for dtype, scale in product(DTYPES, _SCALES)
    ]
    answers = ask(lambda: [stand_in(module)._apply_gate(x) for x in inputs])  # type: ignore[operator]
    for act, multiply in PRODUCTS.items():
        ours = tuple(multiply(*x.chunk(2, -1)) for x in inputs)
        if answers and agrees(OP[act], tuple(answers), ours, 1):
            return Experts, act
    return "computes no product that metalcore has"
