# SPDX-License-Identifier: MIT
"""The second half of a Llama layer: y = residual + down(silu(gate(n)) * up(n)), n = rms_norm(x).

Each projection may have a low-rank adapter. For the backward pass only x, gate(n) and up(n) are
kept; n and the product that goes into `down` are one cheap pass each, and are computed again.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore._accuracy import set_accuracy
from metalcore._autocast import is_autocast, to_multiply, without_autocast
from metalcore._check import (
    are_transformed,
    expect_float,
    expect_float_or_none,
    expect_same_device,
    expect_same_dtype,
    expect_shape,
    expect_tensors,
    refuse,
    refuse_tangents,
    shape,
)
from metalcore._op import Composition, Example
from metalcore._route import Values
from metalcore.ops.train.lora_linear import (
    Projection,
    adapt,
    expect_adapter,
    gradient_of_input,
    gradients_of_weights,
    plain,
    project,
    through_adapter,
    without_empty,
)
from metalcore.ops.train.rms_norm import backward as norm_backward
from metalcore.ops.train.rms_norm import forward as norm_forward
from metalcore.ops.train.rms_norm import resolve_eps
from metalcore.ops.train.swiglu import swiglu, swiglu_bwd

_mlp = Composition(
    "fused_swiglu_mlp(Tensor x, Tensor? residual, Tensor? rms_weight,"
    " Tensor gate, Tensor? gate_A, Tensor? gate_B, Tensor up, Tensor? up_A, Tensor? up_B,"
    " Tensor down, Tensor? down_A, Tensor? down_B,"
    " Tensor? gate_mask, Tensor? up_mask, Tensor? down_mask, float eps, float[] factors)"
    " -> (Tensor y, Tensor gated, Tensor upped)"
)

Grads = tuple[Tensor | None, ...]

# the norm, both projections and their product are rounded on the way, and so are their gradients
set_accuracy("fused_swiglu_mlp", 16.0)


def _sized(x: Tensor) -> tuple[Tensor, ...]:
    """Arguments with so many hidden values."""
    gate, up, down = torch.randn(3, 176, 64).to(x.dtype)
    return x.view(-1, 64), gate, up, down.T.contiguous()


_route = Values("fused_swiglu_mlp", "", _sized)
_PARTS = ("gate", "up", "down")


def fused_swiglu_mlp(
    hidden_states: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    lora_gate_A: Tensor | None = None,
    lora_gate_B: Tensor | None = None,
    lora_up_A: Tensor | None = None,
    lora_up_B: Tensor | None = None,
    lora_down_A: Tensor | None = None,
    lora_down_B: Tensor | None = None,
    rms_weight: Tensor | None = None,
    rms_eps: float | None = 1e-6,
    *,
    residual: Tensor | None = None,
    lora_scale: float = 1.0,
    dropout: float = 0.0,
    training: bool = True,
) -> Tensor:
    """RMSNorm, gate and up projection, SwiGLU, down projection and residual, as one block.

    Between the passes, the inputs and two tensors [..., I] are held. Weights that need no gradient
    cost nothing in the backward pass.

    Args:
        hidden_states: [..., H], float32, float64, float16 or bfloat16.
        gate_proj, up_proj: weights [I, H].
        down_proj: weight [H, I].
        lora_gate_A, lora_gate_B, lora_up_A, lora_up_B, lora_down_A, lora_down_B: adapters as for
            `lora_linear`; each pair may be left out. Without adapters, name what follows.
        rms_weight: [H], or None for a norm without scale.
        rms_eps: as for `rms_norm`.
        residual: what the result is added to; default `hidden_states`.
        lora_scale, dropout, training: of every adapter, as for `lora_linear`.

    Returns:
        [..., H], in the dtype of the residual.

    Example:
        >>> y = metalcore.fused_swiglu_mlp(x, gate, up, down, rms_weight=norm.weight, rms_eps=1e-6)
        >>> y = metalcore.fused_swiglu_mlp(
        ...     x, gate, up, down, gate_A, gate_B, up_A, up_B, down_A, down_B, norm.weight, 1e-6
        ... )
    """
    op = "fused_swiglu_mlp"
    pairs = ((lora_gate_A, lora_gate_B), (lora_up_A, lora_up_B), (lora_down_A, lora_down_B))
    weights = (gate_proj, up_proj, down_proj)
    names = ("{}_proj", "lora_{}_{matrix}")
    _expect(op, hidden_states, weights, pairs, rms_weight, residual, names)
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    drop = dropout if training else 0.0
    projections = []
    for weight, pair in zip(weights, pairs, strict=True):
        W, A, B = to_multiply(weight, *without_empty(pair))
        projections.append(adapt(op, x.shape[0], W, A, B, lora_scale, drop))
    base = None if residual is None else residual.reshape(x.shape)
    eps = resolve_eps(op, x, rms_eps)
    if are_transformed():
        y = _by_parts(x, base, rms_weight, eps, projections)
    elif _route.prefers_torch(x, *weights):
        y = _route.by_torch(_by_parts, x, base, rms_weight, eps, projections)
    else:
        tensors = [t for p in projections for t in p[:3]] + [p.mask for p in projections]
        factors = [p.factor for p in projections]
        y, _, _ = _mlp(x, base, rms_weight, *tensors, eps, factors)
    return y.view(hidden_states.shape)


def _by_parts(
    x: Tensor,
    residual: Tensor | None,
    rms_weight: Tensor | None,
    eps: float,
    projections: Sequence[Projection],
) -> Tensor:
    """By torch's products, and with the gradients of the parts."""
    gate, up, down = projections
    n = norm_forward(x, rms_weight, eps, 0.0)[0].to(gate.weight.dtype)
    y = plain(swiglu(plain(n, gate), plain(n, up)), down)
    base = x if residual is None else residual
    return (y + base).to(base.dtype)


def fused_mlp_bwd(
    d_out: Tensor,
    x_norm: Tensor,
    gate: Tensor,
    up: Tensor,
    W_gate: Tensor,
    W_up: Tensor,
    W_down: Tensor,
    A_gate: Tensor | None,
    B_gate: Tensor | None,
    A_up: Tensor | None,
    B_up: Tensor | None,
    A_down: Tensor | None,
    B_down: Tensor | None,
    scale: float,
    hidden_states: Tensor,
    rms_weight: Tensor | None,
    rstd: Tensor,
    *,
    weight_grads: bool = True,
) -> Grads:
    """The gradients of `fused_swiglu_mlp` without its residual, for loops that call them by hand.

    Args:
        d_out: gradient of the result, [..., H].
        x_norm: what was projected: the normalised `hidden_states`, [..., H].
        gate, up: results of these projections, [..., I].
        W_gate, W_up, W_down: [I, H], [I, H] and [H, I].
        A_gate, B_gate, A_up, B_up, A_down, B_down: adapters as for `lora_linear`; None or empty
            where there is none.
        scale: of the adapters.
        hidden_states: what was normalised, [..., H].
        rms_weight: [H], or None.
        rstd: 1 / root mean square of each row of `hidden_states`, [...] or [..., 1].
        weight_grads: False for frozen W_gate, W_up and W_down, which then get None.

    Returns:
        The gradients of hidden_states, W_gate, W_up, W_down, A_gate, B_gate, A_up, B_up, A_down,
        B_down and rms_weight; None for what there is not.

    Example:
        >>> d_hidden, dW_gate, *rest, d_rms = metalcore.fused_mlp_bwd(
        ...     d_out, x_norm, gate, up, W_gate, W_up, W_down, *adapters, 1.0, x, weight, rstd
        ... )
    """
    op = "fused_mlp_bwd"
    expect_tensors(op, d_out=d_out, x_norm=x_norm, gate=gate, up=up, rstd=rstd)
    pairs = ((A_gate, B_gate), (A_up, B_up), (A_down, B_down))
    weights = (W_gate, W_up, W_down)
    _expect(op, hidden_states, weights, pairs, rms_weight, None, ("W_{}", "{matrix}_{}"))
    adapters = (matrix for pair in pairs for matrix in pair)
    given = (d_out, x_norm, gate, up, hidden_states, rms_weight, rstd)
    refuse_tangents(op, (*given, *weights, *adapters))
    for name, t in (("d_out", d_out), ("x_norm", x_norm)):
        expect_shape(op, name, t, hidden_states.shape)
    for name, t in (("gate", gate), ("up", up)):
        expect_shape(op, name, t, (*hidden_states.shape[:-1], W_gate.shape[0]))
    dy, n, g, u, x = (
        t.detach().reshape(-1, t.shape[-1]) for t in (d_out, x_norm, gate, up, hidden_states)
    )
    projections = [
        adapt(op, len(x), weight, *without_empty(pair), scale, 0.0)
        for weight, pair in zip(weights, pairs, strict=True)
    ]
    wanted = (True, rms_weight is not None, *(weight_grads, True, True) * 3)
    with torch.no_grad():
        dx, dnorm, *rest = _gradients(
            dy, n, rstd.reshape(-1), x, rms_weight, g, u, projections, wanted, None
        )
    dx = None if dx is None else dx.view(hidden_states.shape)
    (dWg, dAg, dBg), (dWu, dAu, dBu), (dWd, dAd, dBd) = rest[:3], rest[3:6], rest[6:]
    return dx, dWg, dWu, dWd, dAg, dBg, dAu, dBu, dAd, dBd, dnorm


def _expect(
    op: str,
    x: Tensor,
    weights: Sequence[Tensor],
    pairs: Sequence[tuple[Tensor | None, Tensor | None]],
    rms_weight: Tensor | None,
    residual: Tensor | None,
    names: tuple[str, str],
) -> None:
    """`names` are how weights and adapters are called, such as "W_{}" and "{matrix}_{}"."""
    _expect_shapes(op, x, weights, rms_weight, residual, names[0])
    first = pairs[0][0]
    if first is not None and first.dim() == 1 and first.numel() > 0:
        refuse(
            op,
            f"adapters must be matrices, got {shape(first)} for the first one; without adapters, "
            "name what comes after them, as in rms_weight=weight",
        )
    for part, weight, pair in zip(_PARTS, weights, pairs, strict=True):
        if pair != (None, None):
            a, b = (names[1].format(part, matrix=matrix) for matrix in "AB")
            expect_adapter(op, weight, *without_empty(pair), (a, b))


def _shapes_match(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> bool:
    return (
        x.dim() > 0
        and gate.dim() == 2
        and x.shape[-1] == gate.shape[1]
        and up.shape == gate.shape
        and down.shape == (gate.shape[1], gate.shape[0])
    )


def _expect_shapes(
    op: str,
    x: Tensor,
    weights: Sequence[Tensor],
    rms_weight: Tensor | None,
    residual: Tensor | None,
    name: str,
) -> None:
    of_gate, of_up, of_down = (name.format(part) for part in _PARTS)
    matrices = dict(zip((of_gate, of_up, of_down), weights, strict=True))
    named = {"hidden_states": x, **matrices}
    expect_float(op, **named)
    expect_float_or_none(op, rms_weight=rms_weight, residual=residual)
    expect_same_device(op, **named, rms_weight=rms_weight, residual=residual)
    expect_same_dtype(op, **(matrices if is_autocast(x) else named))
    if not _shapes_match(x, *weights):
        found = ", ".join(f"{name} {shape(t)}" for name, t in named.items())
        refuse(
            op,
            f"hidden_states must be [..., H], {of_gate} and {of_up} [I, H] and {of_down} [H, I]; "
            f"got {found}",
        )
    expect_shape(op, "rms_weight", rms_weight, x.shape[-1:])
    expect_shape(op, "residual", residual, x.shape)


def _gradients(
    dy: Tensor,
    n: Tensor,
    rstd: Tensor,
    x: Tensor,
    rms_weight: Tensor | None,
    g: Tensor,
    u: Tensor,
    projections: Sequence[Projection],
    wanted: Sequence[bool],
    dsum: Tensor | None,
) -> Grads:
    """Of x, rms_weight, and of the weight, A and B of each projection, as far as they are wanted;
    `dsum` is another gradient of x, to be added."""
    gate, up, down = projections
    dtype = gate.weight.dtype
    of_norm, of_gate, of_up, of_down = wanted[:2], wanted[2:5], wanted[5:8], wanted[8:]
    dx, dnorm = dsum, None
    dgates: Grads = (None,) * 3
    dups: Grads = (None,) * 3
    ddowns: Grads = (None,) * 3
    dy = dy.to(dtype)
    inner = through_adapter(dy, down)
    if any(of_down):
        ddowns = gradients_of_weights(dy, inner, swiglu(g, u), down, of_down)
    if any(wanted[:8]):
        dgate, dup = swiglu_bwd(gradient_of_input([(dy, inner, down)], dtype), g, u)
        gate_inner, up_inner = through_adapter(dgate, gate), through_adapter(dup, up)
        dgates = gradients_of_weights(dgate, gate_inner, n, gate, of_gate)
        dups = gradients_of_weights(dup, up_inner, n, up, of_up)
        if any(of_norm):
            outputs = [(dgate, gate_inner, gate), (dup, up_inner, up)]
            dn = gradient_of_input(outputs, dtype).to(x.dtype)
            dx, dnorm = norm_backward(dn, x, rms_weight, rstd, 0.0, dsum, of_norm[1])
    return dx, dnorm if of_norm[1] else None, *dgates, *dups, *ddowns


@_mlp.forward
def _(x: Tensor, residual: Tensor | None, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    rms_weight, eps, (gate, up, down) = _unpack(args)
    with without_autocast(x):
        n = norm_forward(x, rms_weight, eps, 0.0)[0].to(gate.weight.dtype)
        g, u = project(n, gate), project(n, up)
        del n
        y = project(swiglu(g, u), down, x if residual is None else residual)
    return y, g, u


@_mlp.reference
def _(x: Tensor, residual: Tensor | None, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    rms_weight, eps, (gate, up, down) = _unpack(args)
    n = F.rms_norm(x, x.shape[-1:], rms_weight, eps).to(gate.weight.dtype)
    g, u = plain(n, gate), plain(n, up)
    base = x if residual is None else residual
    return (plain(F.silu(g) * u, down) + base).to(base.dtype), g, u


@_mlp.determines
def _(y: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor]:
    # kept for the backward pass alone
    return (y,)


@_mlp.example
def _(dtype: torch.dtype) -> Example:
    sizes = ((5, 8), (5, 8), (8,), *((6, 8), (2, 8), (6, 2)) * 2, (8, 6), (2, 6), (8, 2))
    x, residual, rms_weight, *projections = (torch.randn(s).to(dtype) for s in sizes)
    mask = (torch.arange(40) % 3 > 0).view(5, 8).to(torch.uint8)
    args = (x, residual, rms_weight, *projections, mask, None, None, 1e-3, [1.5, 1.0, 0.5])
    return Example(args, reduces_over=8)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, *args = inputs
    _, g, u = output
    ctx.mark_non_differentiable(g, u)
    *tensors, ctx.eps, ctx.factors = args
    ctx.save_for_backward(x, g, u, *tensors)
    ctx.adds_x = residual is None


@_mlp.gradient(save=_save)
def _(ctx: Any, dy: Tensor, _dg: Any, _du: Any) -> Any:
    x, g, u, *tensors = ctx.saved_tensors
    rms_weight, eps, projections = _unpack((*tensors, ctx.eps, ctx.factors))
    needs = ctx.needs_input_grad
    wanted = (needs[0], *needs[2:12])
    with without_autocast(dy):
        n, rstd = norm_forward(x, rms_weight, eps, 0.0)
        n = n.to(projections[0].weight.dtype)
        if torch.is_grad_enabled():
            # to be differentiated again, they must come from the inputs
            g, u = (project(n, p) for p in projections[:2])
        dsum = dy if ctx.adds_x else None
        dx, *rest = _gradients(dy, n, rstd, x, rms_weight, g, u, projections, wanted, dsum)
    return dx, None if ctx.adds_x else dy, *rest, *(None,) * 5


def _unpack(args: Sequence[Any]) -> tuple[Tensor | None, float, tuple[Projection, ...]]:
    """rms_weight, eps and the projections, of the arguments of `_mlp` that follow the residual."""
    rms_weight, *tensors, eps, factors = args
    return rms_weight, eps, _projections(tensors, factors)


def _projections(
    tensors: Sequence[Tensor | None], factors: Sequence[float]
) -> tuple[Projection, ...]:
    """Three of them, from weight, A and B of each, and then their masks."""
    return tuple(
        Projection._make((*tensors[3 * i : 3 * i + 3], tensors[9 + i], factors[i]))
        for i in range(3)
    )
