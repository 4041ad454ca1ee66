# SPDX-License-Identifier: MIT
"""Sizes of ggml's blocks, by their numbers in files, as `ggml.h` has them."""

from typing import NamedTuple

from metalcore.metal.program import Buffer


class Block(NamedTuple):
    """Values and bytes of a block, and bytes for each row of it in a tile."""

    values: int
    bytes: int
    tile_bytes: int


BLOCKS = {
    2: Block(32, 18, 18),
    3: Block(32, 20, 20),
    6: Block(32, 22, 22),
    7: Block(32, 24, 24),
    8: Block(32, 34, 34),
    12: Block(256, 144, 148),
    13: Block(256, 176, 180),
    14: Block(256, 210, 210),
    20: Block(32, 18, 18),
    39: Block(32, 17, 17),
}


def columns(blocks: Buffer, type: int) -> int:
    """K: how many values a row has."""
    block = BLOCKS[type]
    return blocks.shape[-1] // block.bytes * block.values
