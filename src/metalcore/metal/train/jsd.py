# SPDX-License-Identifier: MIT
"""Launches of jsd and jsd_backward."""

from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import Planned, metal_kernel
from metalcore.metal.train import _divergence


@metal_kernel("jsd")
def plan_forward(
    policy: Values, input: Tensor, target: Tensor, beta: float, reduce: bool, scale: float
) -> Planned | None:
    return _divergence.plan_forward(policy, "jsd", input, target, beta, reduce, scale)


@metal_kernel("jsd_backward")
def plan_backward(
    policy: Values,
    dloss: Tensor,
    input: Tensor,
    target: Tensor,
    beta: float,
    reduce: bool,
    scale: float,
    need_dtarget: bool,
) -> Planned | None:
    return _divergence.plan_backward(
        policy, "jsd", dloss, input, target, beta, reduce, scale, need_dtarget
    )
