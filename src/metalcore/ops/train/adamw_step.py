# SPDX-License-Identifier: MIT
"""AdamW over a list of tensors, and the norm of their gradients.

    m = m + (1 - beta1) (g - m),  v = beta2 v + (1 - beta2) g^2
    p = (1 - lr weight_decay) p - lr m_hat / (sqrt(v_hat) + eps)

m_hat and v_hat are m / (1 - beta1^step) and v / (1 - beta2^step); with amsgrad v_hat has the
largest v so far in the place of v. `metalcore.optim.AdamW` is the optimizer around these ops.
"""

import torch
from torch import Tensor

from metalcore._op import Example, Op, accumulate, accumulate_dtype
from metalcore.ops.train._eight_bit import (
    bound_of,
    dequantize,
    in_blocks,
    quantize,
    random_bits,
    round_by_chance,
)

# Moments are of the accumulation type, or uint8 (see _eight_bit.py). max_exp_avg_sqs is empty
# without amsgrad. `steps` are float scalars, counted up here. Gradients are divided by grad_scale,
# in place, then clipped to max_norm where there is a grad_norm, of the gradients before division.
step = Op(
    "adamw_step(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs,"
    " Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] steps, float lr,"
    " float beta1, float beta2, float eps, float weight_decay, bool maximize, float grad_scale,"
    " Tensor? grad_norm, float max_norm, bool stochastic, int seed) -> ()"
)
norm = Op("adamw_norm(Tensor[] grads) -> Tensor")


@step.reference
def _(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    grad_scale: float,
    grad_norm: Tensor | None,
    max_norm: float,
    stochastic: bool,
    seed: int,
) -> None:
    for k, (p, grad, count) in enumerate(zip(params, grads, steps, strict=True)):
        count += 1
        number = count.double()
        if grad_scale != 1:
            grad /= grad_scale
        g = accumulate(grad)
        if grad_norm is not None:
            g = g * (max_norm / (grad_norm / grad_scale + 1e-6)).clamp(max=1.0).to(g.dtype)
        if maximize:
            g = -g
        moments = [exp_avgs[k], exp_avg_sqs[k], *max_exp_avg_sqs[k : k + 1]]
        m, v, *most = [_values(s, i == 0, p) for i, s in enumerate(moments)]
        m = m + (g - m) * (1 - beta1)
        v = v * beta2 + g * g * (1 - beta2)
        most = [torch.maximum(x, v) for x in most]
        root = [*most, v][0].sqrt() / (1 - beta2**number).sqrt().to(g.dtype)
        step_size = (lr / (1 - beta1**number)).to(g.dtype)
        new = accumulate(p) * (1 - lr * weight_decay) - step_size * (m / (root + eps))

        bits = random_bits(p, seed, number, k)
        if stochastic and p.dtype == torch.bfloat16:
            new = round_by_chance(new, bits)
        p.copy_(new)
        if moments[0].dtype == torch.uint8:
            _store_in_8_bits(moments, [m, v, *most], g, beta1, beta2, bits)
        else:
            for moment, value in zip(moments, [m, v, *most], strict=True):
                moment.copy_(value)


def _values(moment: Tensor, signed: bool, p: Tensor) -> Tensor:
    return dequantize(moment, signed, p) if moment.dtype == torch.uint8 else moment


def _store_in_8_bits(
    moments: list[Tensor],
    values: list[Tensor],
    g: Tensor,
    beta1: float,
    beta2: float,
    bits: Tensor,
) -> None:
    """Store with the largest values that can come up for the gradients of a block as bounds."""
    largest = in_blocks(g).abs().amax(1, keepdim=True)
    bounds = [bound_of(moment, i == 0) for i, moment in enumerate(moments)]
    bounds[0] = bounds[0] + (largest - bounds[0]) * (1 - beta1)
    bounds[1] = bounds[1] * beta2 + largest * largest * (1 - beta2)
    bounds[2:] = [torch.maximum(b, bounds[1]) for b in bounds[2:]]
    noise = [bits & 0xFFFFF, bits >> 12, bits >> 12]
    for i, moment in enumerate(moments):
        moment.copy_(quantize(values[i], i == 0, bounds[i], noise[i]))


@norm.reference
def _(grads: list[Tensor]) -> Tensor:
    squares = [accumulate(g).square().sum() for g in grads]
    dtype = torch.float64 if torch.float64 in {s.dtype for s in squares} else torch.float32
    return torch.stack([s.to(dtype) for s in squares]).sum().sqrt()


@step.example
def _(dtype: torch.dtype) -> Example:
    sizes = ((5, 77), (3,), (4000,))
    params, grads = ([torch.randn(size).to(dtype) for size in sizes] for _ in range(2))
    moments = [torch.rand(size).to(accumulate_dtype(params[0])) for size in sizes]
    steps = [torch.tensor(3.0) for _ in sizes]
    return Example(
        (
            *(params, grads, moments, [m.clone() for m in moments], [], steps),
            *(1e-2, 0.9, 0.99, 1e-8, 0.1, False, 1.0, None, 0.0, False, 0),
        ),
        reduces_over=1,
    )


@norm.example
def _(dtype: torch.dtype) -> Example:
    grads = [torch.randn(size).to(dtype) for size in ((5, 77), (3,), (40000,))]
    return Example((grads,), reduces_over=40000)
