# SPDX-License-Identifier: MIT
"""The training loss of a causal language model without the logits of all tokens.

While a model computes a loss, its output layer returns `LazyLogits`, and the loss function of the
model, whatever it is, meets them in `torch.nn.functional.cross_entropy`.
"""

import functools
import inspect
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from metalcore._autocast import to_multiply
from metalcore._check import FLOATS
from metalcore.patch.logits import lazy_linear
from metalcore.patch.swap import Origin, Swapped

_has_labels: ContextVar[bool] = ContextVar("metalcore_has_labels", default=False)


class LossModel(Swapped):
    """A model that computes its loss: says so to its output layer."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # trainers read the names of the arguments
        origin: Origin = cls.origin
        original: Any = origin.base.forward
        takes = list(inspect.signature(original).parameters)
        position = takes.index("labels") - 1 if "labels" in takes else len(takes)

        @functools.wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            labels = args[position] if len(args) > position else kwargs.get("labels")
            if labels is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return original(self, *args, **kwargs)
            before = _has_labels.set(True)
            try:
                return original(self, *args, **kwargs)
            finally:
                _has_labels.reset(before)

        cls.forward = forward  # type: ignore[attr-defined]


class OutputLayer(Swapped):
    """The linear layer from hidden states to logits."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not (_has_labels.get() and torch.is_grad_enabled()):
            return super().forward(input)  # type: ignore[misc,no-any-return]
        hidden, weight, bias = to_multiply(input, self.weight, self.bias)
        if hidden.dtype != weight.dtype or hidden.dtype not in FLOATS or hidden.dim() < 2:
            return super().forward(input)  # type: ignore[misc,no-any-return]
        return lazy_linear(hidden, weight, bias)


def recognise(model: nn.Module) -> nn.Linear | str | None:
    """The output layer whose logits `model` computes a loss from; a string says why it is left
    alone; None for a model without labels."""
    forward = type(model).forward
    if "labels" not in inspect.signature(forward).parameters:
        return None
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or not hasattr(model, "loss_function"):
        return None
    if type(head) is not nn.Linear:
        kind = type(head)
        return f"the output layer is a {kind.__name__} of {kind.__module__}, not of torch.nn"
    if "forward" in vars(head) or "forward" in vars(model):
        return "its forward was replaced already"
    if any(type(p) not in (Tensor, nn.Parameter) for p in head.parameters()):
        return "the weights of the output layer are not plain tensors"
    return head
