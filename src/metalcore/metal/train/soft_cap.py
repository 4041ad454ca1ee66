# SPDX-License-Identifier: MIT
"""Launches of soft_cap and soft_cap_backward."""

from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import Planned, metal_kernel
from metalcore.metal.train._elementwise import plan_elementwise


@metal_kernel("soft_cap")
def plan_forward(policy: Values, x: Tensor, cap: float) -> Planned | None:
    return plan_elementwise(policy, "soft_cap", (x,), cap)


@metal_kernel("soft_cap_backward")
def plan_backward(policy: Values, dy: Tensor, x: Tensor, cap: float) -> Planned | None:
    return plan_elementwise(policy, "soft_cap_backward", (dy, x), cap)
