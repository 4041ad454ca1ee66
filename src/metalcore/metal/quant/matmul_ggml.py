# SPDX-License-Identifier: MIT
"""Programs of matmul_ggml, its gradient, and pack_ggml."""

import torch

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import MSL_TYPE, Arguments, Buffer, Program
from metalcore.metal.quant._formats import BLOCKS, columns
from metalcore.metal.quant._products import Weight, aligned, columns_held, gradient, product
from metalcore.metal.train._elementwise import in_neighbours

FILE = "quant/matmul_ggml.metal"
TILE_ROWS, SLICES = 16, 16


@metal_kernel("pack_ggml")
def pack(p: Program, a: Arguments) -> Buffer:
    blocks = p.dense(a.blocks)
    rows, count = blocks.shape[0], blocks.shape[1] // BLOCKS[a.type].bytes
    size = TILE_ROWS * BLOCKS[a.type].tile_bytes
    tiles = p.new((-(-rows // TILE_ROWS), count, size), torch.uint8)
    if tiles.numel:
        args = (blocks, tiles, rows, count)
        threads = (size, count, tiles.shape[0])
        p.launch(FILE, "pack_ggml", (a.type,), args, *in_neighbours(p, threads))
    return tiles


@metal_kernel("matmul_ggml")
def matmul(p: Program, a: Arguments) -> Buffer:
    x = aligned(p, a.x)
    N, K = a.blocks.shape[0], columns(a.blocks, a.type)
    M = x.numel // max(1, K)
    if a.tiles is None or p.policy["most_rows"] < M or not M * N * K:
        return product(p, x, _weight(p, a))
    y = p.new((*x.shape[:-1], N), x.dtype)
    variant = (MSL_TYPE[x.dtype], a.type, columns_held(M))
    args = (x, p.dense(a.tiles), y, M, N, K)
    threads = (TILE_ROWS, SLICES, -(-N // TILE_ROWS))
    p.launch(FILE, "matmul_ggml_tiles", variant, args, threads, (TILE_ROWS, SLICES, 1))
    return y


@metal_kernel("matmul_ggml_backward")
def backward(p: Program, a: Arguments) -> Buffer:
    return gradient(p, p.dense(a.dy), _weight(p, a))


def _weight(p: Program, a: Arguments) -> Weight:
    blocks = aligned(p, a.blocks)
    sizes = blocks.shape[0], columns(blocks, a.type)
    return Weight(FILE, "matmul_ggml", (a.type,), (blocks,), sizes)
