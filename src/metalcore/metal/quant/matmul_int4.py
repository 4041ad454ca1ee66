# SPDX-License-Identifier: MIT
"""Programs of matmul_int4 and matmul_int8, of their gradients, and of what packs their weights."""

from typing import Any

import torch

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import MSL_TYPE, Arguments, Program
from metalcore.metal.quant._products import Weight, aligned, gradient, product
from metalcore.metal.train._elementwise import in_neighbours

FILE = "quant/matmul_int4.metal"
TILE_ROWS = 16


def _weight(p: Program, a: Arguments, bits: int, columns: int) -> Weight:
    packed, scale = aligned(p, a.packed), p.dense(a.scale)
    bias = scale if a.bias is None else p.dense(a.bias)
    is_whole = columns % 32 == 0
    variant = (bits, MSL_TYPE[scale.dtype], a.bias is not None, is_whole)
    buffers, sizes = (packed, scale, bias), (packed.shape[0], columns)
    return Weight(FILE, "matmul_int", variant, buffers, sizes, (a.group_size,))


def _plans(bits: int) -> None:
    @metal_kernel(f"matmul_int{bits}")
    def matmul(p: Program, a: Arguments) -> Any:
        if a.scale.dtype not in MSL_TYPE:
            return NotImplemented
        x = aligned(p, a.x)
        return product(p, x, _weight(p, a, bits, x.shape[-1]))

    @metal_kernel(f"matmul_int{bits}_backward")
    def backward(p: Program, a: Arguments) -> Any:
        if a.scale.dtype not in MSL_TYPE:
            return NotImplemented
        return gradient(p, p.dense(a.dy), _weight(p, a, bits, a.columns))

    @metal_kernel(f"pack_int{bits}")
    def pack(p: Program, a: Arguments) -> Any:
        if a.scale.dtype not in MSL_TYPE:
            return NotImplemented
        w = _weight(p, a, bits, a.columns)
        rows, groups = a.scale.shape
        fields = 1 if a.bias is None else 2
        size = TILE_ROWS * (fields * a.scale.dtype.itemsize + a.group_size * bits // 8)
        tiles = p.new((-(-rows // TILE_ROWS), groups, size), torch.uint8)
        if tiles.numel:
            args = (*w.buffers, tiles, rows, a.columns, a.group_size)
            threads = (size, groups, tiles.shape[0])
            p.launch(FILE, "pack_int", w.variant[:3], args, *in_neighbours(p, threads))
        return tiles


for _bits in (4, 8):
    _plans(_bits)
