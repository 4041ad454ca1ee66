# SPDX-License-Identifier: MIT
"""Launches of kl_div and kl_div_backward."""

from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import Planned, metal_kernel
from metalcore.metal.train import _divergence


@metal_kernel("kl_div")
def plan_forward(
    policy: Values, input: Tensor, target: Tensor, log_target: bool, reduce: bool, scale: float
) -> Planned | None:
    return _divergence.plan_forward(
        policy, "kl_div", input, target, float(log_target), reduce, scale
    )


@metal_kernel("kl_div_backward")
def plan_backward(
    policy: Values,
    dloss: Tensor,
    input: Tensor,
    target: Tensor,
    log_target: bool,
    reduce: bool,
    scale: float,
    need_dtarget: bool,
) -> Planned | None:
    return _divergence.plan_backward(
        policy, "kl_div", dloss, input, target, float(log_target), reduce, scale, need_dtarget
    )
