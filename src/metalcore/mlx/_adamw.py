# SPDX-License-Identifier: MIT
"""AdamW over a list of arrays: what the op writes in place are new arrays here."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import torch

from metalcore._op import Op
from metalcore.mlx import _ways
from metalcore.mlx._function import on_gpu
from metalcore.mlx._simulate import simulated
from metalcore.mlx.exchange import from_torch, to_torch

Arrays = list[mx.array]


def adamw_step(
    parameters: Arrays,
    gradients: Arrays,
    m: Arrays,
    v: Arrays,
    *,
    step: int | mx.array,
    learning_rate: float | mx.array,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    stream: Any = None,
) -> tuple[Arrays, Arrays, Arrays]:
    """One step of AdamW for all parameters.

    Args:
        parameters: arrays of float32, float16 or bfloat16 (float64 on the CPU).
        gradients: of their shapes and dtypes.
        m: first moments, float32 (float64 for float64).
        v: second moments.
        step: the number of this step, from 1 on. It and `learning_rate` are read, so a schedule is
            evaluated.
        learning_rate, betas, eps, weight_decay: as of `mlx.optimizers.AdamW`, with the bias of the
            moments corrected.
        stream: where it is computed.

    Returns:
        New parameters, first and second moments.

    Example:
        >>> p, m, v = metalcore.mlx.adamw_step(p, g, m, v, step=1, learning_rate=1e-4)
    """
    numbers = (float(learning_rate), *map(float, betas), eps, weight_decay)
    rest = (*numbers, False, 1.0, None, 0.0, False, 0)
    before = float(step) - 1
    with mx.stream(mx.default_stream(mx.default_device()) if stream is None else stream):
        kernels = simulated() or (_ways.METAL_WAY if on_gpu(stream) else None)
        if kernels is not None:
            steps = [mx.array(before, mx.float32) for _ in parameters]
            lists: tuple[Arrays, ...] = (parameters, gradients, m, v, [], steps)
            made = kernels.updated("adamw_step", (*lists, *rest))
            if made is not None:
                n = len(parameters)
                return made[:n], made[2 * n : 3 * n], made[3 * n : 4 * n]
        return _at_once((parameters, gradients, m, v), before, rest)


def _at_once(
    lists: Sequence[Arrays], before: float, rest: Sequence[Any]
) -> tuple[Arrays, Arrays, Arrays]:
    """By our kernel for the CPU, on copies: arrays are never changed."""
    copies = [[to_torch(x).clone() for x in arrays] for arrays in lists]
    Op.all["adamw_step"](*copies, [], [torch.tensor(before) for _ in lists[0]], *rest)
    p, _, m, v = ([from_torch(t) for t in tensors] for tensors in copies)
    return p, m, v
