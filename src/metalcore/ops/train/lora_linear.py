# SPDX-License-Identifier: MIT
"""A linear layer with a low-rank adapter: y = x W^T + bias + scale * dropout(x) A^T B^T."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore import _trace
from metalcore._accuracy import set_accuracy
from metalcore._autocast import to_multiply, without_autocast
from metalcore._check import (
    are_transformed,
    expect_float,
    expect_float_or_none,
    expect_same_device,
    expect_same_dtype,
    expect_shape,
    expect_tensors,
    refuse,
    shape,
)
from metalcore._op import Composition, Example
from metalcore.ops.train._products import inner_dtype, is_slow_in_torch, sum_of_products

# the product with A is rounded before the one with B, and their sum once more
set_accuracy("lora_linear", 8.0)

_lora_linear = Composition(
    "lora_linear(Tensor x, Tensor? bias, Tensor weight, Tensor? A, Tensor? B, Tensor? mask,"
    " float factor) -> Tensor"
)


class Projection(NamedTuple):
    """A weight [N, K] and, unless they are None, its adapter's A [r, K] and B [N, r].

    `mask` [M, K] says which inputs of the adapter are kept; `factor` is scale / (1 - dropout).
    """

    weight: Tensor
    A: Tensor | None = None
    B: Tensor | None = None
    mask: Tensor | None = None
    factor: float = 1.0


def lora_linear(
    x: Tensor,
    weight: Tensor,
    A: Tensor,
    B: Tensor,
    bias: Tensor | None = None,
    scale: float = 1.0,
    dropout: float = 0.0,
    training: bool = True,
) -> Tensor:
    """`linear(x, weight, bias) + scale * linear(linear(dropout(x), A), B)`.

    W + scale * B A is never formed, a frozen weight gets no gradient computed, and of dropout one
    byte per value of x is kept. On CPUs without instructions for half precision, products are
    computed in float32 and rounded once.

    Args:
        x: [..., K], float32, float64, float16 or bfloat16.
        weight: [N, K], in the dtype of `x`.
        A, B: [r, K] and [N, r], both in the dtype of `x` or both in float32.
        bias: [N].
        scale: of the adapter; alpha / r in most papers.
        dropout: probability that an input of the adapter is left out.
        training: whether there is dropout at all.

    Returns:
        [..., N], in the dtype of `x` (of autocast, under it).

    Example:
        >>> y = metalcore.lora_linear(x, layer.weight, A, B, scale=2.0, dropout=0.05)
    """
    op = "lora_linear"
    expect_tensors(op, x=x, weight=weight, A=A, B=B)
    x, weight, bias, A, B = to_multiply(x, weight, bias, A, B)
    _expect(op, x, weight, A, B, bias)
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    p = adapt(op, flat.shape[0], weight, A, B, scale, dropout if training else 0.0)
    if not torch.compiler.is_compiling() and _trace.entered:
        _trace.record_torch_path(op, x)
    if are_transformed() or (p.mask is None and not is_slow_in_torch(flat, weight.T)):
        y = plain(flat, p, bias)
    else:
        y = _lora_linear(flat, bias, *p)
    return y if flat is x else y.view(*x.shape[:-1], weight.shape[0])


def _expect(op: str, x: Tensor, weight: Tensor, A: Tensor, B: Tensor, bias: Tensor | None) -> None:
    expect_float(op, x=x, weight=weight)
    expect_float_or_none(op, bias=bias)
    expect_same_device(op, x=x, weight=weight, bias=bias)
    expect_same_dtype(op, x=x, weight=weight)
    if not (weight.dim() == 2 and x.dim() > 0 and x.shape[-1] == weight.shape[1]):
        refuse(
            op, f"x must be [..., K] and weight [N, K]; got x {shape(x)} and weight {shape(weight)}"
        )
    expect_adapter(op, weight, A, B)
    expect_shape(op, "bias", bias, weight.shape[:1])


def without_empty(pair: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    """An adapter; None for two empty tensors, which some loops pass where there is none."""
    return (None, None) if all(t is None or t.numel() == 0 for t in pair) else pair


def expect_adapter(
    op: str,
    weight: Tensor,
    A: Tensor | None,
    B: Tensor | None,
    names: tuple[str, str] = ("A", "B"),
) -> None:
    """`names` are how the caller calls A and B."""
    of_a, of_b = names
    if (A is None) != (B is None):
        refuse(op, f"{of_a} and {of_b} come together; pass both or neither")
    if A is None or B is None:
        return
    named = {"weight": weight, of_a: A, of_b: B}
    expect_float(op, **named)
    expect_same_device(op, **named)
    if not (
        A.dim() == B.dim() == 2
        and A.shape[1] == weight.shape[1]
        and B.shape == (weight.shape[0], A.shape[0])
    ):
        refuse(
            op,
            f"{of_a} must be [r, K] and {of_b} [N, r] where the weight is [N, K]; got {of_a} "
            f"{shape(A)}, {of_b} {shape(B)} and the weight {shape(weight)}",
        )
    if A.dtype is not torch.float32:
        expect_same_dtype(op, **{"weight": weight, of_a: A})
    expect_same_dtype(op, **{of_a: A, of_b: B})


def adapt(
    op: str,
    rows: int,
    weight: Tensor,
    A: Tensor | None,
    B: Tensor | None,
    scale: float,
    dropout: float,
) -> Projection:
    """The projection of [rows, K], with what dropout keeps drawn as torch's function draws it."""
    if not 0.0 <= dropout <= 1.0:
        refuse(op, f"dropout must be from 0 to 1, got {dropout}")
    if A is None or dropout == 0.0:
        return Projection(weight, A, B, None, float(scale))
    # torch multiplies by bytes three times as fast as by booleans
    mask = torch.empty(rows, weight.shape[1], dtype=torch.uint8, device=weight.device)
    factor = scale / (1.0 - dropout) if dropout < 1.0 else 0.0
    return Projection(weight, A, B, mask.bernoulli_(1.0 - dropout), factor)


def plain(x: Tensor, p: Projection, bias: Tensor | None = None) -> Tensor:
    """p(x) + bias by torch's own functions, and with their gradients."""
    y = F.linear(x, p.weight, bias)
    if p.A is None or p.B is None:
        return y
    low = F.linear((x if p.mask is None else x * p.mask).to(p.A.dtype), p.A)
    if low.dtype == y.dtype:
        return torch.addmm(y, low, p.B.T, alpha=p.factor)
    return (y + p.factor * F.linear(low, p.B)).to(x.dtype)


def project(x: Tensor, p: Projection, add: Tensor | None = None) -> Tensor:
    """add + p(x), [M, N]; `add` is a bias, or of the result's shape and then sets its dtype."""
    terms = [(x, p.weight.T, 1.0)]
    if p.A is not None and p.B is not None:
        kept = x if p.mask is None else x * p.mask
        inner = sum_of_products([(kept, p.A.T, 1.0)], inner_dtype(x, p.A))
        terms.append((inner, p.B.T, p.factor))
    dtype = x.dtype if add is None or add.dim() == 1 else add.dtype
    return sum_of_products(terms, dtype, add)


def through_adapter(dy: Tensor, p: Projection) -> Tensor | None:
    """The gradient of what lies between A and B, [M, r], before the factor."""
    if p.B is None:
        return None
    return sum_of_products([(dy, p.B, 1.0)], inner_dtype(dy, p.B))


def gradient_of_input(
    outputs: Sequence[tuple[Tensor, Tensor | None, Projection]], dtype: torch.dtype
) -> Tensor:
    """dx of projections of one x, from dy, `through_adapter` and the projection of each."""
    terms, masked = [], []
    for dy, inner, p in outputs:
        terms.append((dy, p.weight, 1.0))
        if inner is not None and p.A is not None:
            low_rank = (inner, p.A, p.factor)
            if p.mask is None:
                terms.append(low_rank)
            else:
                masked.append((low_rank, p.mask))
    dx = sum_of_products(terms, dtype)
    for low_rank, mask in masked:
        dx += sum_of_products([low_rank], dtype) * mask
    return dx


def gradients_of_weights(
    dy: Tensor, inner: Tensor | None, x: Tensor, p: Projection, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Those of weight, A and B that are wanted, from dy and `through_adapter`."""
    dweight = dA = dB = None
    if wanted[0]:
        dweight = sum_of_products([(dy.T, x, 1.0)], p.weight.dtype)
    if p.A is not None and p.B is not None and any(wanted[1:]):
        kept = x if p.mask is None else x * p.mask
        if wanted[1] and inner is not None:
            dA = sum_of_products([(inner.T, kept, p.factor)], p.A.dtype)
        if wanted[2]:
            low = sum_of_products([(kept, p.A.T, 1.0)], inner_dtype(kept, p.A))
            dB = sum_of_products([(dy.T, low, p.factor)], p.B.dtype)
    return dweight, dA, dB


@_lora_linear.forward
def _(x: Tensor, bias: Tensor | None, *projection: Any) -> Tensor:
    with without_autocast(x):
        return project(x, Projection._make(projection), bias)


@_lora_linear.reference
def _(x: Tensor, bias: Tensor | None, *projection: Any) -> Tensor:
    return plain(x, Projection._make(projection), bias)


@_lora_linear.example
def _(dtype: torch.dtype) -> Example:
    x, weight, A, B = (torch.randn(s).to(dtype) for s in ((5, 8), (7, 8), (2, 8), (7, 2)))
    mask = (torch.arange(40) % 3 > 0).view(5, 8).to(torch.uint8)
    return Example((x, torch.randn(7).to(dtype), weight, A, B, mask, 1.5), reduces_over=8)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Inputs alone, so that the backward pass can be differentiated again."""
    x, bias, *tensors, ctx.factor = inputs
    ctx.save_for_backward(x if any(ctx.needs_input_grad[2:5]) else None, *tensors)
    ctx.bias_dtype = None if bias is None else bias.dtype


@_lora_linear.gradient(save=_save)
def _(ctx: Any, dy: Tensor) -> Any:
    x, *tensors = ctx.saved_tensors
    p = Projection._make((*tensors, ctx.factor))
    needs = ctx.needs_input_grad
    dx = dbias = None
    with without_autocast(dy):
        inner = through_adapter(dy, p) if needs[0] or needs[3] else None
        if needs[0]:
            dx = gradient_of_input([(dy, inner, p)], dy.dtype)
        dweights: Any = (None,) * 3
        if x is not None:
            dweights = gradients_of_weights(dy, inner, x, p, needs[2:5])
        if needs[1]:
            dbias = dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32))
            dbias = dbias.to(ctx.bias_dtype)
    return dx, dbias, *dweights, None, None
