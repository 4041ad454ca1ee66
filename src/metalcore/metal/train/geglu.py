# SPDX-License-Identifier: MIT
"""Launches of geglu and geglu_backward."""

from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import Planned, metal_kernel
from metalcore.metal.train._elementwise import plan_elementwise


@metal_kernel("geglu")
def plan_forward(policy: Values, gate: Tensor, up: Tensor, tanh: bool) -> Planned | None:
    return plan_elementwise(policy, "geglu", (gate, up), int(tanh))


@metal_kernel("geglu_backward")
def plan_backward(
    policy: Values, dy: Tensor, gate: Tensor, up: Tensor, tanh: bool
) -> Planned | None:
    return plan_elementwise(policy, "geglu_backward", (dy, gate, up), int(tanh), outputs=2)
