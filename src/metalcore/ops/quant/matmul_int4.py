# SPDX-License-Identifier: MIT
"""x W^T for a W of 4 or 8 bits in groups, and the gradients of x, scale and bias."""

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
from metalcore._op import Example, Op, accumulate
from metalcore.ops.quant._activation import expect_activation
from metalcore.ops.quant._groups import expect_groups, group_fields, group_sums, group_values
from metalcore.ops.quant._tiles import tiles_of
from metalcore.ops.quant.quantize_int4 import (
    QuantizedInt4,
    QuantizedInt8,
    quantize_int4,
    quantize_int8,
)

_WEIGHT = "Tensor packed, Tensor scale, Tensor? bias"


def _letters(x: Any, packed: Any, scale: Any, bias: Any, tiles: Any, *_: Any) -> str:
    # tiles are of 16 rows
    n = "n" if tiles is None else "N"
    return f"*K, {n}P, {n}G, {n}G, TSB -> *{n}"


class _Ops:
    """The ops of weights of so many bits."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.name = f"matmul_int{bits}"
        self.matmul = Op(
            f"{self.name}(Tensor x, {_WEIGHT}, Tensor? tiles, int group_size, str activation)"
            " -> Tensor",
            sharding=_letters,
        )
        self.backward = Op(
            f"{self.name}_backward(Tensor dy, {_WEIGHT}, int group_size, int columns) -> Tensor",
            sharding="*n, nK, nG, nG -> *K",
        )
        self.pack = Op(
            f"pack_int{bits}({_WEIGHT}, int group_size, int columns) -> Tensor",
            sharding="NK, NG, NG -> TSB",
        )
        self.matmul.reference(self._product)
        self.backward.reference(self._dx)
        self.pack.reference(self._tiles)
        self.matmul.gradient(save=_save)(self._gradient)
        self.backward.differentiate_reference()

    def _product(
        self,
        x: Tensor,
        packed: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        tiles: Tensor | None,
        group: int,
        activation: str,
    ) -> Tensor:
        columns = x.shape[-1] if x.dim() else -1
        self._expect(x, packed, scale, bias, group, columns)
        expect_activation(self.name, activation)
        if tiles is not None:
            size = self._tiles(packed, scale.detach(), bias, group, columns).shape
            if tiles.shape != size or tiles.dtype != torch.uint8:
                refuse(self.name, f"tiles must be those of the weight, got {shape(tiles)}")
        a = accumulate(x)
        weight = group_values(packed, scale, bias, self.bits, group, columns)
        return (a @ weight.to(a.dtype).mT).to(x.dtype)

    def _dx(
        self,
        dy: Tensor,
        packed: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        group: int,
        columns: int,
    ) -> Tensor:
        self._expect(dy, packed, scale, bias, group, columns)
        if not dy.dim() or dy.shape[-1] != packed.shape[0]:
            refuse(f"{self.name}_backward", f"dy must be [..., N], got {shape(dy)}")
        a = accumulate(dy)
        weight = group_values(packed, scale, bias, self.bits, group, columns)
        return (a @ weight.to(a.dtype)).to(dy.dtype)

    def _expect(self, x: Tensor, *weight: Any) -> None:
        if x.dtype not in FLOATS:
            raise TypeError(f"{self.name}: x must be floating, got {dtype_name(x.dtype)}")
        packed, scale, bias, group, columns = weight
        expect_groups(self.name, packed, scale, bias, self.bits, group, columns)

    def _tiles(
        self, packed: Tensor, scale: Tensor, bias: Tensor | None, group: int, columns: int
    ) -> Tensor:
        expect_groups(f"pack_int{self.bits}", packed, scale, bias, self.bits, group, columns)
        found = group_fields(packed, scale.detach(), bias, self.bits, group, columns)
        return tiles_of(found, self.bits)

    def _gradient(self, ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, packed, scale, bias = ctx.saved_tensors
        columns, wanted = x.shape[-1], ctx.needs_input_grad
        dx = self.backward(dy, packed, scale, bias, ctx.group, columns) if wanted[0] else None
        dscale, dbias = None, None
        if wanted[2] or wanted[3]:
            dweight = accumulate(dy).flatten(0, -2).mT @ accumulate(x).flatten(0, -2)
            dscale, dbias = group_sums(dweight, packed, self.bits, ctx.group, bias is None)
            dscale = dscale.to(scale.dtype)
            dbias = None if dbias is None else dbias.to(scale.dtype)
        return dx, None, dscale, dbias, None, None, None

    def multiply(
        self,
        x: Tensor,
        q: QuantizedInt4 | QuantizedInt8,
        bias: Tensor | None,
        activation: str,
        tiles: Tensor | None,
    ) -> Tensor:
        op = self.name
        (x,) = to_multiply(x)
        expect_float(op, x=x)
        expect_rank(op, x, 1)
        expect_groups(op, q.packed, q.scale, q.bias, self.bits, q.group_size, q.columns)
        expect_same_device(op, x=x, packed=q.packed, scale=q.scale, bias=bias, tiles=tiles)
        if x.shape[-1] != q.columns:
            refuse(op, f"x must be [..., {q.columns}], got {shape(x)}")
        expect_activation(op, activation)
        args = (q.packed, q.scale, q.bias, tiles, q.group_size, activation)
        y: Tensor = self.matmul(x, *args)
        return y if bias is None else y + bias.to(y.dtype)

    def packed(self, q: QuantizedInt4 | QuantizedInt8) -> Tensor:
        expect_groups(
            f"pack_int{self.bits}", q.packed, q.scale, q.bias, self.bits, q.group_size, q.columns
        )
        bias = None if q.bias is None else q.bias.detach()
        return self.pack(q.packed, q.scale.detach(), bias, q.group_size, q.columns)  # type: ignore[no-any-return]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.group = inputs[5]


_int4, _int8 = _Ops(4), _Ops(8)


def matmul_int4(
    x: Tensor,
    q: QuantizedInt4,
    bias: Tensor | None = None,
    *,
    activation: str = "auto",
    tiles: Tensor | None = None,
) -> Tensor:
    """`x @ W.T + bias` for a weight in 4 bits. The gradient goes to x, and to scales that ask.

    Args:
        x: [..., K], float32, float64, float16 or bfloat16.
        q: what `quantize_int4` made of [N, K].
        bias: [N], or none.
        activation: how precisely a CPU takes x, as for `matmul_ggml`.
        tiles: what `pack_int4` made of `q`, so that it is not rearranged in each call.

    Returns:
        [..., N] in the dtype of x.

    Example:
        >>> y = metalcore.matmul_int4(x, metalcore.quantize_int4(weight))
    """
    return _int4.multiply(x, q, bias, activation, tiles)


def matmul_int8(
    x: Tensor,
    q: QuantizedInt8,
    bias: Tensor | None = None,
    *,
    activation: str = "auto",
    tiles: Tensor | None = None,
) -> Tensor:
    """`x @ W.T + bias` for a weight in 8 bits. The gradient goes to x, and to scales that ask.

    Args:
        x: [..., K], float32, float64, float16 or bfloat16.
        q: what `quantize_int8` made of [N, K].
        bias, activation: as for `matmul_int4`.
        tiles: what `pack_int8` made of `q`.

    Returns:
        [..., N] in the dtype of x.

    Example:
        >>> y = metalcore.matmul_int8(x, metalcore.quantize_int8(weight))
    """
    return _int8.multiply(x, q, bias, activation, tiles)


def pack_int4(q: QuantizedInt4) -> Tensor:
    """`q` rearranged for products: 16 rows side by side. Made once per weight, and kept.

    Args:
        q: what `quantize_int4` made.

    Returns:
        uint8 tiles. The layout is no file format: save `q`.

    Example:
        >>> tiles = metalcore.pack_int4(q)
    """
    return _int4.packed(q)


def pack_int8(q: QuantizedInt8) -> Tensor:
    """`q` rearranged for products, as `pack_int4`.

    Args:
        q: what `quantize_int8` made.

    Returns:
        uint8 tiles.

    Example:
        >>> tiles = metalcore.pack_int8(q)
    """
    return _int8.packed(q)


def _examples(ops: _Ops, make: Any, symmetric: bool) -> None:
    K, N = 100, 40

    def weight(dtype: torch.dtype) -> tuple[Any, ...]:
        q = make(torch.randn(N, K), 32, symmetric=symmetric)
        # float64 keeps float64 scales, so that derivatives are checked by finite differences
        kept = dtype if dtype == torch.float64 else q.scale.dtype
        return q.packed, q.scale.to(kept), None if q.bias is None else q.bias.to(kept)

    for tiled in (False, True):

        @ops.matmul.example
        def _(dtype: torch.dtype, tiled: bool = tiled) -> Example:
            # as many rows as no instruction set has tiles
            w, x = weight(dtype), torch.randn(7, K).to(dtype)
            tiles = ops.pack.meaning(*w, 32, K) if tiled else None
            return Example((x, *w, tiles, 32, "float"), reduces_over=K)

    @ops.backward.example
    def _(dtype: torch.dtype) -> Example:
        return Example((torch.randn(3, N).to(dtype), *weight(dtype), 32, K), reduces_over=N)

    @ops.pack.example
    def _(dtype: torch.dtype) -> Example:
        return Example((*weight(dtype), 32, K), reduces_over=1)


for _symmetric in (False, True):
    _examples(_int4, quantize_int4, _symmetric)
    _examples(_int8, quantize_int8, _symmetric)
