# SPDX-License-Identifier: MIT
"""Launches of silu, bias_silu and their gradients."""

from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import Planned, metal_kernel
from metalcore.metal.train._elementwise import plan_with_bias


@metal_kernel("silu")
def plan_forward(policy: Values, x: Tensor) -> Planned | None:
    return plan_with_bias(policy, "silu", (x,), None)


@metal_kernel("silu_backward")
def plan_backward(policy: Values, dy: Tensor, x: Tensor) -> Planned | None:
    return plan_with_bias(policy, "silu_backward", (dy, x), None)


@metal_kernel("bias_silu")
def plan_bias_forward(policy: Values, x: Tensor, bias: Tensor) -> Planned | None:
    return plan_with_bias(policy, "silu", (x,), bias)


@metal_kernel("bias_silu_backward")
def plan_bias_backward(policy: Values, dy: Tensor, x: Tensor, bias: Tensor) -> Planned | None:
    return plan_with_bias(policy, "silu_backward", (dy, x), bias)
