# SPDX-License-Identifier: MIT
"""Between MLX arrays and torch tensors, without a copy where both can reach the memory."""

from importlib.metadata import version
from typing import Any

import mlx.core as mx
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from metalcore._check import refuse

_DTYPES = {
    torch.float32: mx.float32,
    torch.float16: mx.float16,
    torch.bfloat16: mx.bfloat16,
    torch.float64: mx.float64,
    torch.int8: mx.int8,
    torch.int16: mx.int16,
    torch.int32: mx.int32,
    torch.int64: mx.int64,
    torch.uint8: mx.uint8,
    torch.uint16: mx.uint16,
    torch.uint32: mx.uint32,
    torch.uint64: mx.uint64,
    torch.bool: mx.bool_,
    torch.complex64: mx.complex64,
}
MLX = tuple(map(int, version("mlx").split(".")[:2]))
# Before 0.32 a tensor by DLPack outlives the memory of its array, and there is none of bfloat16.
_DLPACK_KEEPS_MEMORY = MLX >= (0, 32)
_BACK = {theirs: ours for ours, theirs in _DTYPES.items()}


def mlx_dtype(dtype: torch.dtype) -> mx.Dtype:
    if dtype not in _DTYPES:
        refuse("metalcore.mlx", f"MLX has no {dtype}")
    return _DTYPES[dtype]


def torch_dtype(dtype: mx.Dtype) -> torch.dtype:
    return _BACK[dtype]


def to_torch(x: mx.array) -> Tensor:
    """A tensor of the values of `x`.

    Args:
        x: an array; it is evaluated.

    Returns:
        A tensor on `mps` where MLX computes on an Apple GPU, else on the CPU. It shares the memory
        of `x`: what is written to one is seen in the other.

    Example:
        >>> t = metalcore.mlx.to_torch(mx.ones((2, 3)))
    """
    mx.eval(x)
    return shared(x)


def shared(x: Any) -> Tensor:
    """The memory of an array that is evaluated, or of a contiguous copy."""
    if x.size == 0:
        return torch.empty(x.shape, dtype=torch_dtype(x.dtype))
    # torch has no negative strides
    if not memoryview(x).c_contiguous:
        x = mx.contiguous(x)
    if not _DLPACK_KEEPS_MEMORY:
        memory: Any = x.reshape(-1).view(mx.uint8)
        return torch.frombuffer(memoryview(memory), dtype=torch_dtype(x.dtype)).view(x.shape)
    if x.dtype == mx.bool_:
        return from_dlpack(x.view(mx.uint8)).view(torch.bool)
    return from_dlpack(x)


def from_torch(x: Tensor) -> mx.array:
    """An array of the values of `x`.

    Args:
        x: a tensor, on the CPU or on `mps`; its gradient is not followed.

    Returns:
        An array. An `mps` tensor shares its memory where torch has put it into memory that both
        can reach (torch 2.12 and later); torch's work on it is waited for. Of any other tensor
        MLX makes a copy.

    Example:
        >>> a = metalcore.mlx.from_torch(torch.ones(2, 3))
    """
    x = x.detach()
    if x.numel() == 0:
        return mx.zeros(tuple(x.shape), mlx_dtype(x.dtype))
    if x.device.type == "mps":
        torch.mps.synchronize()
    if x.dtype == torch.bool:
        return mx.array(x.contiguous().view(torch.uint8)).view(mx.bool_)
    if x.dtype == torch.float64:
        return mx.array(x.contiguous().numpy(), mx.float64)
    if hasattr(mx, "from_dlpack"):
        made: Any = mx.from_dlpack(x.contiguous())
        return made
    if x.dtype == torch.bfloat16:
        return mx.array(x.contiguous().view(torch.uint16)).view(mx.bfloat16)
    return mx.array(x)
