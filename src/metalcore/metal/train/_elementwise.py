# SPDX-License-Identifier: MIT
"""The launch of an elementwise kernel."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import MSL_TYPE, Launch, Planned, round_up


def plan_elementwise(
    policy: Values, function: str, inputs: Sequence[Tensor], *rest: Any, outputs: int = 1
) -> Planned | None:
    """`function(inputs, outputs, chunks, *rest)` with one thread per chunk of four values, or of
    one where the tensors do not allow wide accesses. The outputs are like the first input.
    """
    first = inputs[0]
    if first.dtype not in MSL_TYPE:
        return None
    inputs = [x.contiguous() for x in inputs]
    width = _width(inputs)
    results = [torch.empty_like(inputs[0]) for _ in range(outputs)]
    args = (*inputs, *results, first.numel() // width, *rest)
    found = results[0] if outputs == 1 else tuple(results)
    return _launches(policy, function, first, width, args), found


def plan_with_bias(
    policy: Values, function: str, inputs: Sequence[Tensor], bias: Tensor | None, *rest: Any
) -> Planned | None:
    """`function(inputs, bias, output, chunks, chunks of the bias, *rest)`; 0 if there is none."""
    first = inputs[0]
    if first.dtype not in MSL_TYPE:
        return None
    inputs = [x.contiguous() for x in inputs]
    row = inputs[0] if bias is None else bias.contiguous()
    width = _width((*inputs, row))
    y = torch.empty_like(inputs[0])
    chunks_of_row = 0 if bias is None else row.numel() // width
    args = (*inputs, row, y, first.numel() // width, chunks_of_row, *rest)
    return _launches(policy, function, first, width, args), y


def _width(tensors: Sequence[Tensor]) -> int:
    return 4 if all(x.numel() % 4 == 0 == x.storage_offset() % 4 for x in tensors) else 1


def _launches(
    policy: Values, function: str, first: Tensor, width: int, args: tuple[Any, ...]
) -> list[Launch]:
    if first.numel() == 0:
        return []
    return [
        Launch(
            f"train/{function.removesuffix('_backward')}.metal",
            function,
            f"{MSL_TYPE[first.dtype]}_{width}",
            args,
            threads=(round_up(first.numel() // width, policy["threads"]), 1, 1),
            group=(policy["threads"], 1, 1),
        )
    ]
