# SPDX-License-Identifier: MIT
"""Losses of `hidden @ weight.T + bias`, a chunk of tokens at a time.

The logits of all tokens are never held. Where a gradient is recorded, that of each chunk is turned
into its share of dhidden, dweight and dbias at once, in the forward pass.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from metalcore._check import (
    expect_float,
    expect_float_or_none,
    expect_same_device,
    expect_same_dtype,
    expect_shape,
    refuse,
    shape,
)
from metalcore._native import in_huge_pages
from metalcore._op import accumulate_dtype
from metalcore._policy import policy, when_changed
from metalcore.ops.train._products import multiply_into

# `chunk_mib` is the most that a chunk of logits takes: less memory, or longer matrix products. One
# of `enough_tokens` and `enough_mib` is long enough: products are no faster in longer ones, whose
# logits leave the caches.
_sizes: dict[str, dict[str, int]] = {}


@when_changed
def _read_sizes() -> None:
    built_in = {"chunk_mib": 128, "enough_tokens": 256, "enough_mib": 32}
    for backend in ("cpu", "metal"):
        _sizes[backend] = policy("linear_cross_entropy", backend, **built_in)


_read_sizes()

# `loss(logits, rows, need_dlogits)` of the tokens in the slice `rows`: the loss, or one per token,
# and the gradient of the logits, which may take their memory; None where it is not needed.
ChunkLoss = Callable[[Tensor, slice, bool], tuple[Tensor, Tensor | None]]


def expect_linear(op: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    expect_float(op, hidden=hidden, weight=weight)
    expect_float_or_none(op, bias=bias)
    expect_same_device(op, hidden=hidden, weight=weight, bias=bias)
    both = {"hidden": hidden, "weight": weight}
    expect_same_dtype(op, **(both if bias is None else both | {"bias": bias}))
    if not (weight.dim() == 2 and hidden.dim() > 0 and hidden.shape[-1] == weight.shape[1]):
        refuse(
            op,
            "hidden must be [..., H] and weight [classes, H]; "
            f"got hidden {shape(hidden)} and weight {shape(weight)}",
        )
    expect_shape(op, "bias", bias, weight.shape[:1])


def chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """Slices of about equal length, such that the logits of each stay within the policy."""
    tokens, classes = hidden.shape[0], weight.shape[0]
    where = "metal" if hidden.device.type == "mps" else "cpu"
    sizes = _sizes[where]
    row = max(1, classes * hidden.element_size())
    enough = max(sizes["enough_tokens"], (sizes["enough_mib"] << 20) // row)
    most = max(1, min(enough, (sizes["chunk_mib"] << 20) // row))
    count = max(1, -(-tokens // most))
    size = -(-tokens // count)
    return (slice(i, min(tokens, i + size)) for i in range(0, tokens, max(1, size)))


class Gradients:
    """dhidden, dweight and dbias as far as they are wanted, a chunk of dlogits at a time."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, bool, bool]
    ) -> None:
        self.hidden, self.weight = hidden, weight
        self.dhidden = torch.empty_like(hidden) if wanted[0] else None
        self.dweight: Tensor | None = None
        self.need_dweight = wanted[1]
        has_bias = wanted[2] and bias is not None
        self.dbias = weight.new_zeros(weight.shape[0], dtype=accumulate_dtype(weight))
        self.bias_dtype = bias.dtype if has_bias and bias is not None else None

    def add(self, rows: slice, dlogits: Tensor) -> None:
        if self.dhidden is not None:
            multiply_into(self.dhidden[rows], dlogits, self.weight)
        if self.need_dweight and self.dweight is None:
            # the first chunk needs no zeros to add to
            self.dweight = _product(dlogits.T, self.hidden[rows])
        elif self.dweight is not None:
            multiply_into(self.dweight, dlogits.T, self.hidden[rows], add=True)
        if self.bias_dtype is not None:
            self.dbias += dlogits.sum(0, dtype=self.dbias.dtype)

    @property
    def all(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dbias = None if self.bias_dtype is None else self.dbias.to(self.bias_dtype)
        if self.need_dweight and self.dweight is None:
            self.dweight = torch.zeros_like(self.weight)
        return self.dhidden, self.dweight, dbias


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, in memory that is quick to touch first."""
    if torch.compiler.is_compiling():
        return a @ b
    out = in_huge_pages(a.new_empty(a.shape[0], b.shape[1]))
    multiply_into(out, a, b)
    return out


def run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    loss: ChunkLoss,
    gradients: Gradients | None,
) -> list[Tensor]:
    """The loss of each chunk; its gradients are added up where they are wanted."""
    losses = []
    memory: Tensor | None = None
    for rows in chunks(hidden, weight):
        part = hidden[rows]
        if torch.compiler.is_compiling() or memory is None:
            logits = memory = _product(part, weight.T)
        else:
            # no chunk is longer than the first one
            logits = memory[: part.shape[0]]
            multiply_into(logits, part, weight.T)
        if bias is not None:
            logits += bias
        one, dlogits = loss(logits, rows, gradients is not None)
        losses.append(one)
        if gradients is not None and dlogits is not None:
            gradients.add(rows, dlogits)
    return losses
