# SPDX-License-Identifier: MIT
"""x W^T for a W in ggml's blocks, and the gradient of x. W is not trained."""

from typing import Any

import torch
from torch import Tensor

from metalcore._autocast import to_multiply
from metalcore._check import (
    FLOATS,
    dtype_name,
    expect_float,
    expect_rank,
    expect_same_device,
    refuse,
    shape,
)
from metalcore._op import Example, Op, accumulate, accumulate_dtype
from metalcore.ops.quant._activation import expect_activation
from metalcore.ops.quant._ggml import (
    FORMATS,
    Format,
    columns,
    dequantized,
    expect_blocks,
    fields,
    format_of,
    known,
)
from metalcore.ops.quant._tiles import tiles_of
from metalcore.ops.quant.quantize_ggml import quantize_meaning


def _letters(x: Any, blocks: Any, tiles: Any, *_: Any) -> str:
    # tiles are of 16 rows
    return "*K, nB, TSB -> *n" if tiles is None else "*K, NB, TSB -> *N"


_matmul = Op(
    "matmul_ggml(Tensor x, Tensor blocks, Tensor? tiles, int type, str activation) -> Tensor",
    sharding=_letters,
)
_backward = Op(
    "matmul_ggml_backward(Tensor dy, Tensor blocks, int type) -> Tensor", sharding="*n, nB -> *K"
)
_pack = Op("pack_ggml(Tensor blocks, int type) -> Tensor", sharding="NB -> TSB")


def matmul_ggml(
    x: Tensor,
    blocks: Tensor,
    type: str,
    bias: Tensor | None = None,
    *,
    activation: str = "auto",
    tiles: Tensor | None = None,
) -> Tensor:
    """`x @ W.T + bias` for weights that stay in ggml's blocks. The gradient goes to x and bias.

    Args:
        x: [..., K], float32, float64, float16 or bfloat16.
        blocks: uint8 [N, bytes of a row], as `quantize_ggml` makes them and files have them.
        type: their type, such as "q4_K".
        bias: [N], or none.
        activation: how precisely a CPU takes x: "int8" (error 5e-3, as llama.cpp), "int16" (2e-5)
            or "float" (3e-7). "auto" is int16 for up to 8 rows, and above for float32; int8 for
            more rows of half types. A trace tells. GPUs and float64 take x as it is.
        tiles: what `pack_ggml` made of `blocks`: with them a CPU does not have to rearrange the
            weights in each call.

    Returns:
        [..., N] in the dtype of x.

    Example:
        >>> y = metalcore.matmul_ggml(x, blocks, "q4_K", tiles=metalcore.pack_ggml(blocks, "q4_K"))
    """
    op = "matmul_ggml"
    f = format_of(op, type)
    (x,) = to_multiply(x)
    expect_float(op, x=x)
    expect_rank(op, x, 1)
    expect_blocks(op, blocks, f)
    expect_same_device(op, x=x, blocks=blocks, bias=bias, tiles=tiles)
    if blocks.dim() != 2 or x.shape[-1] != columns(blocks, f):
        refuse(
            op,
            f"blocks must be those of [N, K] and x [..., K]; got x {shape(x)} and "
            f"blocks {shape(blocks)} for {columns(blocks, f)} values per row",
        )
    expect_activation(op, activation)
    y: Tensor = _matmul(x, blocks, tiles, f.id, activation)
    return y if bias is None else y + bias.to(y.dtype)


def matmul_ggml_q4_0(
    x: Tensor,
    blocks: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "auto",
    tiles: Tensor | None = None,
) -> Tensor:
    """`matmul_ggml(x, blocks, "q4_0", bias)`.

    Args:
        x: [..., K].
        blocks: uint8 [N, K / 32 * 18].
        bias, activation, tiles: as for `matmul_ggml`.

    Returns:
        [..., N] in the dtype of x.

    Example:
        >>> y = metalcore.matmul_ggml_q4_0(x, metalcore.quantize_ggml_q4_0(weight))
    """
    return matmul_ggml(x, blocks, "q4_0", bias, activation=activation, tiles=tiles)


def pack_ggml(blocks: Tensor, type: str) -> Tensor:
    """`blocks` rearranged for products: 16 rows side by side. Made once per weight, and kept.

    Args:
        blocks: uint8 [N, bytes of a row].
        type: their type.

    Returns:
        uint8 tiles, of as many bytes as the blocks, the rows rounded up to 16; of the K types with
        3 % more. The layout is no file format: save the blocks.

    Example:
        >>> tiles = metalcore.pack_ggml(blocks, "q4_0")
    """
    op = "pack_ggml"
    f = format_of(op, type)
    expect_blocks(op, blocks, f)
    if blocks.dim() != 2:
        refuse(op, f"blocks must be [N, bytes of a row], got {shape(blocks)}")
    return _pack(blocks, f.id)  # type: ignore[no-any-return]


def bits_of(f: Format) -> int:
    """Bits of a quant in a tile."""
    return {"q5_0": 5, "q5_1": 5, "q5_K": 5, "q6_K": 6, "q8_0": 8}.get(f.name, 4)


def _expect(op: str, x: Tensor, length: int, blocks: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"{op}: x must be floating, got {dtype_name(x.dtype)}")
    if not x.dim() or blocks.dim() != 2 or x.shape[-1] != length:
        refuse(op, f"shapes do not fit: {shape(x)} and {shape(blocks)}")


@_matmul.reference
def _(x: Tensor, blocks: Tensor, tiles: Tensor | None, type: int, activation: str) -> Tensor:
    op = "matmul_ggml"
    f = known(op, type)
    expect_blocks(op, blocks, f)
    _expect(op, x, columns(blocks, f), blocks)
    expect_activation(op, activation)
    if tiles is not None and tiles.shape != _pack.meaning(blocks, type).shape:
        refuse(op, f"tiles must be those of the blocks, got {shape(tiles)}")
    weight = dequantized(blocks, f, accumulate_dtype(x))
    return (accumulate(x) @ weight.mT).to(x.dtype)


@_backward.reference
def _(dy: Tensor, blocks: Tensor, type: int) -> Tensor:
    op = "matmul_ggml_backward"
    f = known(op, type)
    expect_blocks(op, blocks, f)
    _expect(op, dy, blocks.shape[0], blocks)
    weight = dequantized(blocks, f, accumulate_dtype(dy))
    return (accumulate(dy) @ weight).to(dy.dtype)


@_pack.reference
def _(blocks: Tensor, type: int) -> Tensor:
    f = known("pack_ggml", type)
    expect_blocks("pack_ggml", blocks, f)
    if blocks.dim() != 2:
        refuse("pack_ggml", f"blocks must be [N, bytes of a row], got {shape(blocks)}")
    return tiles_of(fields(blocks, f), bits_of(f))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.type = inputs[3]


@_matmul.gradient(save=_save)
def _(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
    return _backward(dy, *ctx.saved_tensors, ctx.type), None, None, None, None


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.type = inputs[2]


@_backward.gradient(save=_save_backward)
def _(ctx: Any, ddx: Tensor) -> tuple[Tensor, None, None]:
    return _matmul(ddx, *ctx.saved_tensors, None, ctx.type, "float"), None, None


def _blocks(f: Format, rows: int) -> Tensor:
    blocks: Tensor = quantize_meaning(torch.randn(rows, 2 * f.values), f.id)
    return blocks


def _examples(name: str) -> None:
    f = FORMATS[name]

    def product(dtype: torch.dtype, tiled: bool) -> Example:
        blocks, x = _blocks(f, 19), torch.randn(3, 2 * f.values).to(dtype)
        tiles = _pack.meaning(blocks, f.id) if tiled else None
        return Example((x, blocks, tiles, f.id, "float"), reduces_over=2 * f.values)

    _matmul.example(lambda dtype: product(dtype, tiled=False))
    _matmul.example(lambda dtype: product(dtype, tiled=True))

    @_backward.example
    def _(dtype: torch.dtype) -> Example:
        return Example((torch.randn(3, 40).to(dtype), _blocks(f, 40), f.id), reduces_over=40)

    @_pack.example
    def _(dtype: torch.dtype) -> Example:
        return Example((_blocks(f, 19), f.id), reduces_over=1)


for _name in ("q4_0", "q6_K"):
    _examples(_name)
