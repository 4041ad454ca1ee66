# SPDX-License-Identifier: MIT
"""Rows of a table that stays in ggml's blocks."""

import torch
from torch import Tensor

from metalcore._check import (
    dtype_name,
    expect_same_device,
    expect_tensors,
    is_eager,
    refuse,
    refuse_index,
    shape,
)
from metalcore._op import Example, Op
from metalcore.ops.quant._ggml import (
    FORMATS,
    columns,
    dequantized,
    expect_blocks,
    format_of,
    known,
)
from metalcore.ops.quant.quantize_ggml import expect_dtype, quantize_meaning

_embedding = Op(
    "embedding_ggml(Tensor indices, Tensor blocks, int type, ScalarType dtype) -> Tensor",
    sharding="*, NB -> *K",
)


def embedding_ggml(
    indices: Tensor, blocks: Tensor, type: str, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The rows of a quantized table at `indices`, as floats; only these rows are dequantized.

    Args:
        indices: int64 or int32, any shape.
        blocks: uint8 [N, bytes of a row].
        type: their type, such as "q6_K".
        dtype: float32, float64, float16 or bfloat16.

    Returns:
        [..., K] in `dtype`.

    Example:
        >>> y = metalcore.embedding_ggml(torch.tensor([3, 3, 7]), blocks, "q8_0")
    """
    op = "embedding_ggml"
    f = format_of(op, type)
    expect_tensors(op, indices=indices)
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: indices must be int64 or int32, got {dtype_name(indices.dtype)}")
    expect_blocks(op, blocks, f)
    expect_same_device(op, indices=indices, blocks=blocks)
    expect_dtype(op, dtype)
    if blocks.dim() != 2:
        refuse(op, f"blocks must be [N, bytes of a row], got {shape(blocks)}")
    return _embedding(indices.long(), blocks, f.id, dtype)  # type: ignore[no-any-return]


@_embedding.reference
def _(indices: Tensor, blocks: Tensor, type: int, dtype: torch.dtype) -> Tensor:
    op = "embedding_ggml"
    f = known(op, type)
    expect_blocks(op, blocks, f)
    if blocks.dim() != 2 or indices.dtype != torch.int64:
        refuse(op, f"blocks must be [N, bytes of a row], got {shape(blocks)}")
    rows = blocks.shape[0]
    flat = indices.reshape(-1)
    if flat.is_cpu and is_eager() and flat.numel() and type_is_plain(flat):
        wrong = flat[(flat < 0) | (flat >= rows)]
        if wrong.numel():
            refuse_index(op, int(wrong[0]), f"a table of {rows} rows")
    y = dequantized(blocks.index_select(0, flat), f, dtype)
    return y.reshape(*indices.shape, columns(blocks, f))


def type_is_plain(x: Tensor) -> bool:
    """Whether x has data to look at."""
    return type(x) is Tensor and not x.is_meta


def _example(name: str) -> None:
    f = FORMATS[name]

    @_embedding.example
    def _(dtype: torch.dtype) -> Example:
        blocks = quantize_meaning(torch.randn(7, 2 * f.values), f.id)
        return Example((torch.tensor([[3, 0], [6, 3]]), blocks, f.id, dtype), reduces_over=1)


for _name in ("q4_0", "q6_K"):
    _example(_name)
