# SPDX-License-Identifier: MIT
"""Launches of swiglu and swiglu_backward."""

from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import Planned, metal_kernel
from metalcore.metal.train._elementwise import plan_elementwise


@metal_kernel("swiglu")
def plan_forward(policy: Values, gate: Tensor, up: Tensor) -> Planned | None:
    return plan_elementwise(policy, "swiglu", (gate, up))


@metal_kernel("swiglu_backward")
def plan_backward(policy: Values, dy: Tensor, gate: Tensor, up: Tensor) -> Planned | None:
    return plan_elementwise(policy, "swiglu_backward", (dy, gate, up), outputs=2)
