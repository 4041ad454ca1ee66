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

from metalcore._autocast import is_autocast
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
    # x * sigmoid(1.702 x)
    "quick_gelu": lambda x: silu(x * 1.702) * (1 / 1.702),
}
OP = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu", "quick_gelu": "geglu"}
# what computes an activation without a product
ALONE = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu, tanh", "quick_gelu": "silu, scaled"}


class How(NamedTuple):
    """Names of the parts and of the activation; `up` is None where `gate` holds both, or where
    there is no product. `drop` is a dropout of what goes into `down`."""

    gate: str
    up: str | None
    down: str
    act: str
    drop: str | None = None


class _MLP(Swapped):
    """A layer of one argument, x."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        how: How = self.origin.how
        if kwargs or len(args) != 1 or self._mixes_dtypes(how, args[0]):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        hidden = self.compute(how, *args)
        if how.drop is not None:
            hidden = getattr(self, how.drop)(hidden)
        return getattr(self, how.down)(hidden)

    def _mixes_dtypes(self, how: How, x: Any) -> bool:
        """Whether the last layer is kept in another dtype, as T5 does, and x has to follow."""
        weight = getattr(getattr(self, how.down), "weight", None)
        if not isinstance(weight, Tensor) or not weight.is_floating_point() or is_autocast(x):
            return False
        return weight.dtype is not x.dtype

    def compute(self, how: How, x: Tensor) -> Tensor:
        """What goes into the last layer."""
        raise NotImplementedError


class GatedMLP(_MLP):
    """down(act(gate(x)) * up(x))"""

    def compute(self, how: How, x: Tensor) -> Tensor:
        parts: Any = self
        gate, up = getattr(parts, how.gate)(x), getattr(parts, str(how.up))(x)
        return PRODUCTS[how.act](gate, up)


class FusedGatedMLP(_MLP):
    """down(act(gate) * up), where gate and up are the halves of one linear layer"""

    def compute(self, how: How, x: Tensor) -> Tensor:
        parts: Any = self
        gate, up = getattr(parts, how.gate)(x).chunk(2, dim=-1)
        return PRODUCTS[how.act](gate, up)


class PlainMLP(_MLP):
    """down(act(gate(x)))"""

    def compute(self, how: How, x: Tensor) -> Tensor:
        parts: Any = self
        return ACTIVATIONS[how.act](getattr(parts, how.gate)(x))


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


def _dropouts(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_children() if type(child) is nn.Dropout]


class _Mask(nn.Module):
    """In a probe: a dropout whose mask is known, so that the answer tells where it stands."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.arange(x.shape[-1]) % 3).to(x.dtype)


def is_candidate(module: nn.Module) -> bool:
    """Two or three linear layers, perhaps an activation and a dropout, nothing else; or stacked
    experts."""
    if hasattr(module, "_apply_gate"):
        return True
    linears = _linears(module)
    drops = _dropouts(module)
    others = [c for n, c in module.named_children() if n not in linears and n not in drops]
    return (
        len(linears) in (2, 3)
        and len(others) <= 1
        and len(drops) <= 1
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
    drop = next(iter(_dropouts(module)), None)
    for act in ACTIVATIONS:
        for names in permutations(linears):
            if act not in PRODUCTS and len(names) == 3:
                continue
            if len(names) == 3:
                gate, up, down = names
                sizes = {gate: (_H, _I), up: (_H, _I), down: (_I, _H)}
                yield GatedMLP, How(gate, up, down, act, drop), sizes
            else:
                gate, down = names
                first, last = linears[gate].out_features, linears[down].in_features
                if first == 2 * last and act in PRODUCTS:  # type: ignore[operator]
                    sizes = {gate: (_H, 2 * _I), down: (_I, _H)}
                    yield FusedGatedMLP, How(gate, None, down, act, drop), sizes
                elif first == last:
                    sizes = {gate: (_H, _I), down: (_I, _H)}
                    yield PlainMLP, How(gate, None, down, act, drop), sizes


def _answers(
    module: nn.Module, sizes: dict[str, tuple[int, int]]
) -> list[tuple[nn.Module, Tensor, Tensor]]:
    """Stand-ins with small linear layers, their inputs, and their outputs."""
    answers = []
    for dtype in DTYPES:
        parts: dict[str, nn.Module] = {n: nn.Linear(*s, dtype=dtype) for n, s in sizes.items()}
        parts |= {name: _Mask() for name in _dropouts(module)}
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
