# SPDX-License-Identifier: MIT
"""MLX's own ops where they mean the same and take less time: for few values on the CPU.

From how many values on ours is ahead is in `policy/mlx.toml`: below, the exchange with torch takes
longer than the op. What a function of MLX has no argument for is ours, and so is what is wrong.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metalcore._policy import policy
from metalcore.mlx._ways import note

Own = Callable[..., mx.array | None]


def by_mlx(name: str, args: Sequence[Any], named: dict[str, Any]) -> mx.array | None:
    """The result of MLX's op for a call of `name`; None where ours is to compute it."""
    own = _OWN.get(name)
    if own is None:
        return None
    arrays = [a for a in (*args, *named.values()) if isinstance(a, mx.array)]
    if not arrays or arrays[0].size >= fewest(name):
        return None
    for a in arrays:
        if a.dtype != mx.float32:
            return None
    made = own(*args, **named)
    if made is not None:
        note(name, arrays, "mlx", "")
    return made


def fewest(name: str) -> int:
    """Values from which on our function is ahead of MLX's."""
    values: int = policy(name, "mlx", values=0)["values"]
    return values


def _rms_norm(
    x: mx.array, weight: mx.array | None = None, eps: float | None = None, **other: Any
) -> mx.array | None:
    if other or eps is None or not _is_row(x, weight):
        return None
    return mx.fast.rms_norm(x, weight, eps)


def _layer_norm(
    x: mx.array, weight: mx.array | None = None, bias: mx.array | None = None, eps: float = 1e-5
) -> mx.array | None:
    return mx.fast.layer_norm(x, weight, bias, eps) if _is_row(x, weight, bias) else None


def _softmax(x: mx.array, dim: int = -1, **other: Any) -> mx.array | None:
    return mx.softmax(x, dim) if not other and -x.ndim <= dim < x.ndim else None


def _silu(x: mx.array) -> mx.array:
    return nn.silu(x)


def _gelu(x: mx.array, approximate: str = "none") -> mx.array | None:
    function = {"none": nn.gelu, "tanh": nn.gelu_approx}.get(approximate)
    return None if function is None else function(x)


def _swiglu(gate: mx.array, up: mx.array) -> mx.array | None:
    return nn.silu(gate) * up if gate.shape == up.shape else None


def _geglu(gate: mx.array, up: mx.array, approximate: str = "none") -> mx.array | None:
    made = _gelu(gate, approximate) if gate.shape == up.shape else None
    return None if made is None else made * up


def _is_row(x: mx.array, *weights: mx.array | None) -> bool:
    row = x.shape[-1:]
    for w in weights:
        if w is not None and w.shape != row:
            return False
    return x.ndim > 0


_OWN: dict[str, Own] = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "softmax": _softmax,
    "silu": _silu,
    "gelu": _gelu,
    "swiglu": _swiglu,
    "geglu": _geglu,
}
