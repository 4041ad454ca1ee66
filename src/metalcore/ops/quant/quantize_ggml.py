# SPDX-License-Identifier: MIT
"""Floats to ggml's blocks and back. The bytes are those that llama.cpp writes."""

import torch
from torch import Tensor

from metalcore._check import FLOATS, dtype_name, expect_float, expect_rank, is_eager, refuse, shape
from metalcore._op import Example, Op
from metalcore.ops.quant._ggml import FORMATS, dequantized, expect_blocks, format_of, known
from metalcore.ops.quant._ggml_rules import small_blocks
from metalcore.ops.quant._ggml_search import large_blocks

_quantize = Op("quantize_ggml(Tensor weight, int type) -> Tensor", sharding="*K -> *B")
_dequantize = Op(
    "dequantize_ggml(Tensor blocks, int type, ScalarType dtype) -> Tensor", sharding="*B -> *K"
)

# half's largest number: beyond it, scales and offsets of blocks have none
_LARGEST = 65504.0


def quantize_ggml(weight: Tensor, type: str) -> Tensor:
    """`weight` in blocks of ggml, as they stand in GGUF files; byte for byte what llama.cpp makes.

    Args:
        weight: [..., K], float32, float64, float16 or bfloat16; finite, at most 65504. K is a
            multiple of 32, for the K types of 256.
        type: q4_0, q4_1, q5_0, q5_1, q8_0, q4_K, q5_K, q6_K, iq4_nl or mxfp4.

    Returns:
        uint8 [..., bytes of a row].

    Example:
        >>> blocks = metalcore.quantize_ggml(torch.randn(64, 256), "q4_K")
    """
    op = "quantize_ggml"
    f = format_of(op, type)
    expect_float(op, weight=weight)
    expect_rank(op, weight, 1)
    if weight.shape[-1] % f.values:
        refuse(op, f"rows of {type} are multiples of {f.values} values, got {shape(weight)}")
    weight = weight.detach()
    if is_eager() and weight.device.type == "cpu" and weight.numel():
        largest = weight.abs().max().item()
        # a NaN is not at most anything
        if not largest <= _LARGEST:
            refuse(op, f"weights must be finite and at most {_LARGEST:.0f}, got {largest}")
    return _quantize(weight, f.id)  # type: ignore[no-any-return]


def dequantize_ggml(blocks: Tensor, type: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of ggml's blocks. Exact in float32, as llama.cpp has them; rounded once in others.

    Args:
        blocks: uint8 [..., bytes of a row].
        type: as for `quantize_ggml`.
        dtype: float32, float64, float16 or bfloat16.

    Returns:
        [..., K] in `dtype`.

    Example:
        >>> weight = metalcore.dequantize_ggml(blocks, "q4_K", torch.bfloat16)
    """
    op = "dequantize_ggml"
    f = format_of(op, type)
    expect_blocks(op, blocks, f)
    expect_dtype(op, dtype)
    return _dequantize(blocks, f.id, dtype)  # type: ignore[no-any-return]


def quantize_ggml_q4_0(weight: Tensor) -> Tensor:
    """`quantize_ggml(weight, "q4_0")`.

    Args:
        weight: [..., K].

    Returns:
        uint8 [..., K / 32 * 18].

    Example:
        >>> blocks = metalcore.quantize_ggml_q4_0(torch.randn(64, 64))
    """
    return quantize_ggml(weight, "q4_0")


def dequantize_ggml_q4_0(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`dequantize_ggml(blocks, "q4_0", dtype)`.

    Args:
        blocks: uint8 [..., bytes of a row].
        dtype: float32, float64, float16 or bfloat16.

    Returns:
        [..., K] in `dtype`.

    Example:
        >>> weight = metalcore.dequantize_ggml_q4_0(blocks)
    """
    return dequantize_ggml(blocks, "q4_0", dtype)


def expect_dtype(op: str, dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        names = ", ".join(map(dtype_name, FLOATS))
        raise TypeError(f"{op}: dtype must be one of {names}, got {dtype}")


@_quantize.reference
def quantize_meaning(weight: Tensor, type: int) -> Tensor:
    """The rule of ggml in plain torch."""
    f = known("quantize_ggml", type)
    if not weight.dim() or weight.shape[-1] % f.values:
        refuse("quantize_ggml", f"weight must be [..., blocks of {f.values}], got {shape(weight)}")
    blocks = weight.float().reshape(-1, f.values)
    made = (small_blocks if f.parts == 1 else large_blocks)(blocks, f)
    return made.reshape(*weight.shape[:-1], f.row_bytes(weight.shape[-1]))


@_dequantize.reference
def _(blocks: Tensor, type: int, dtype: torch.dtype) -> Tensor:
    f = known("dequantize_ggml", type)
    expect_blocks("dequantize_ggml", blocks, f)
    return dequantized(blocks, f, dtype)


def _example(name: str) -> None:
    f = FORMATS[name]

    @_quantize.example
    def _(dtype: torch.dtype) -> Example:
        return Example((torch.randn(5, 2 * f.values).to(dtype), f.id), reduces_over=1)

    @_dequantize.example
    def _(dtype: torch.dtype) -> Example:
        blocks = quantize_meaning(torch.randn(5, 2 * f.values), f.id)
        return Example((blocks, f.id, dtype), reduces_over=1)


for _name in ("q4_0", "q6_K"):
    _example(_name)
