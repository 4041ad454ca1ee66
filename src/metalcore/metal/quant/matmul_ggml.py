# SPDX-License-Identifier: MIT
"""Programs of matmul_ggml, its gradient, and pack_ggml."""

import torch

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import MSL_TYPE, Arguments, Buffer, Program
from metalcore.metal.quant._formats import BLOCKS, columns
from metalcore.metal.train._elementwise import in_neighbours

FILE = "quant/matmul_ggml.metal"
TILE_ROWS, SLICES = 16, 16


@metal_kernel("pack_ggml")
def pack(p: Program, a: Arguments) -> Buffer:
    return _packed(p, p.dense(a.blocks), a.type)


def _packed(p: Program, blocks: Buffer, type: int) -> Buffer:
    rows, count = blocks.shape[0], blocks.shape[1] // BLOCKS[type].bytes
    size = TILE_ROWS * BLOCKS[type].tile_bytes
    tiles = p.new((-(-rows // TILE_ROWS), count, size), torch.uint8)
    if tiles.numel:
        args = (blocks, tiles, rows, count)
        threads = (size, count, tiles.shape[0])
        p.launch(FILE, "pack_ggml", (type,), args, *in_neighbours(p, threads))
    return tiles


@metal_kernel("matmul_ggml")
def matmul(p: Program, a: Arguments) -> Buffer:
    x, blocks = p.dense(a.x), p.dense(a.blocks)
    N, K = blocks.shape[0], columns(blocks, a.type)
    y = p.new((*x.shape[:-1], N), x.dtype)
    if K == 0:
        return p.fill(y, 0.0)
    M = x.numel // K
    if p.policy["most_rows"] < M:
        weight = _dequantized(p, blocks, a.type, x.dtype)
        p.matmul(y.view(1, M, N), x.view(1, M, K), weight.view(1, N, K).mT)
    elif y.numel:
        tiles = _packed(p, blocks, a.type) if a.tiles is None else p.dense(a.tiles)
        held = next(n for n in (1, 2, 4, 8) if n >= M)
        variant = (MSL_TYPE[x.dtype], a.type, held)
        threads = (TILE_ROWS, SLICES, -(-N // TILE_ROWS))
        group = (TILE_ROWS, SLICES, 1)
        p.launch(FILE, "matmul_ggml", variant, (x, tiles, y, M, N, K), threads, group)
    return y


@metal_kernel("matmul_ggml_backward")
def backward(p: Program, a: Arguments) -> Buffer:
    dy, blocks = p.dense(a.dy), p.dense(a.blocks)
    N, K = blocks.shape[0], columns(blocks, a.type)
    dx = p.new((*dy.shape[:-1], K), dy.dtype)
    if N == 0:
        return p.fill(dx, 0.0)
    M = dy.numel // N
    weight = _dequantized(p, blocks, a.type, dy.dtype)
    p.matmul(dx.view(1, M, K), dy.view(1, M, N), weight.view(1, N, K))
    return dx


def _dequantized(p: Program, blocks: Buffer, type: int, dtype: torch.dtype) -> Buffer:
    N, K = blocks.shape[0], columns(blocks, type)
    weight = p.new((N, K), dtype)
    if weight.numel:
        variant = (MSL_TYPE[dtype], type)
        grid = in_neighbours(p, (K, N, 1))
        p.launch(FILE, "dequantize_rows", variant, (blocks, weight, K), *grid)
    return weight
