# SPDX-License-Identifier: MIT
"""Launches of gelu, bias_gelu and their gradients."""

from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import Planned, metal_kernel
from metalcore.metal.train._elementwise import plan_with_bias


@metal_kernel("gelu")
def plan_forward(policy: Values, x: Tensor, tanh: bool) -> Planned | None:
    return plan_with_bias(policy, "gelu", (x,), None, int(tanh))


@metal_kernel("gelu_backward")
def plan_backward(policy: Values, dy: Tensor, x: Tensor, tanh: bool) -> Planned | None:
    return plan_with_bias(policy, "gelu_backward", (dy, x), None, int(tanh))


@metal_kernel("bias_gelu")
def plan_bias_forward(policy: Values, x: Tensor, bias: Tensor, tanh: bool) -> Planned | None:
    return plan_with_bias(policy, "gelu", (x,), bias, int(tanh))


@metal_kernel("bias_gelu_backward")
def plan_bias_backward(
    policy: Values, dy: Tensor, x: Tensor, bias: Tensor, tanh: bool
) -> Planned | None:
    return plan_with_bias(policy, "gelu_backward", (dy, x), bias, int(tanh))
