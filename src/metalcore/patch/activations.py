# SPDX-License-Identifier: MIT
"""Activations that are modules of their own, as those between the linear layers of a BERT."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from metalcore._check import FLOATS
from metalcore.patch.mlp import ACTIVATIONS
from metalcore.patch.probe import DTYPES, agrees, ask, stand_in
from metalcore.patch.swap import Swapped


class Activation(Swapped):
    """An elementwise function of one argument."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if type(x) is not Tensor or x.dtype not in FLOATS:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return ACTIVATIONS[self.origin.how](x)


def is_candidate(module: nn.Module) -> bool:
    """Whether `module` may be an activation: no parts, no tensors, one argument."""
    if isinstance(module, Activation):
        return True
    has_nothing = not any((module._modules, module._parameters, module._buffers))
    return has_nothing and len(inspect.signature(type(module).forward).parameters) == 2


def recognise(module: nn.Module) -> tuple[type[Swapped], str] | str | None:
    """The kind and variant that compute what `module` does, or why not; None if it is no activation
    of ours."""
    act = _activation(module)
    if act is not None and "forward" in vars(module):
        return "its forward was replaced already"
    return None if act is None else (Activation, act)


def _activation(module: nn.Module) -> str | None:
    def answer() -> list[tuple[Tensor, Tensor]]:
        answers = []
        for dtype in DTYPES:
            # around zero, where activations differ, and where they are straight
            x = torch.cat((torch.linspace(-6, 6, 97), torch.tensor([-100.0, 100.0]))).to(dtype)
            for training in (False, True):
                probe = stand_in(module)
                probe.training = training
                answers.append((x, probe.forward(x)))
        return answers

    answers = ask(answer) or []
    for act, compute in ACTIVATIONS.items():
        if answers and all(_same(y, compute(x)) for x, y in answers):
            return act
    return None


def _same(theirs: Any, ours: Tensor) -> bool:
    is_like_ours = isinstance(theirs, Tensor) and theirs.shape == ours.shape
    return is_like_ours and agrees("gelu", (theirs,), (ours,), 1)
