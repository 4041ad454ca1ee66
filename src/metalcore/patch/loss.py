# SPDX-License-Identifier: MIT
"""The training loss of a causal language model without the logits of all tokens.

While a model computes a loss, its output layer returns `LazyLogits`, and the loss function of the
model, whatever it is, meets them in `torch.nn.functional.cross_entropy`. A loop that reads its
logits will do so in the next step too: there they are computed at once.
"""

import functools
import inspect
from contextvars import ContextVar
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from metalcore._autocast import to_multiply
from metalcore._check import FLOATS
from metalcore._sharding import is_dtensor
from metalcore.patch.logits import lazy_linear
from metalcore.patch.swap import Origin, Swapped

_has_labels: ContextVar[bool] = ContextVar("metalcore_has_labels", default=False)
# output layers whose last logits were read
_were_read: WeakSet["OutputLayer"] = WeakSet()


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
        if is_dtensor(self.weight) != is_dtensor(input) or self._is_freed_by_hooks():
            return super().forward(input)  # type: ignore[misc,no-any-return]
        hidden, weight, bias = to_multiply(input, self.weight, self.bias)
        if hidden.dtype != weight.dtype or hidden.dtype not in FLOATS or hidden.dim() < 2:
            return super().forward(input)  # type: ignore[misc,no-any-return]
        keep = self in _were_read
        _were_read.discard(self)
        return lazy_linear(
            hidden, weight, bias, keep=keep, when_read=functools.partial(_were_read.add, self)
        )

    def _is_freed_by_hooks(self) -> bool:
        """Whether a hook may look at the logits, or free the weight, before there is a loss. Those
        of tensor parallelism keep DTensors as they are."""
        return not is_dtensor(self.weight) and bool(getattr(self, "_forward_hooks", None))


def recognise(model: nn.Module) -> nn.Linear | str | None:
    """The output layer whose logits `model` computes a loss from; a string says why it is left
    alone; None for a model without labels, and for a wrapper around the one that has them."""
    kind = type(model)
    if "labels" not in inspect.signature(kind.forward).parameters:
        return None
    # of the class: peft's wrappers answer for the model within
    if not (hasattr(kind, "get_output_embeddings") and hasattr(kind, "loss_function")):
        return None
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        return None
    # an output layer that another model shares, or a copy of one, is plain but for its class
    plain = head.origin.base if isinstance(head, OutputLayer) else type(head)
    if plain is not nn.Linear:
        return f"its output layer is a {plain.__module__}.{plain.__name__}, not a torch.nn.Linear"
    if "forward" in vars(head) or "forward" in vars(model):
        return "its forward was replaced already"
    if any(type(p) not in (Tensor, nn.Parameter) and not is_dtensor(p) for p in head.parameters()):
        return "the weights of the output layer are not plain tensors"
    return cast(nn.Linear, head)
