# SPDX-License-Identifier: MIT
"""Program of embedding_ggml."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from metalcore._check import refuse_index
from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import MSL_TYPE, Arguments, Program
from metalcore.metal.quant._formats import columns
from metalcore.metal.train._elementwise import in_neighbours

FILE = "quant/embedding_ggml.metal"


@metal_kernel("embedding_ggml")
def embedding(p: Program, a: Arguments) -> Any:
    if a.dtype not in MSL_TYPE:
        return NotImplemented
    indices, blocks = p.dense(a.indices), p.dense(a.blocks)
    rows, n = blocks.shape[0], columns(blocks, a.type)
    y = p.new((*indices.shape, n), a.dtype)
    if y.numel:
        wrong = p.fill(p.new((1,), torch.int32), 0)
        args = (indices, blocks, y, wrong, rows, n)
        variant = (MSL_TYPE[a.dtype], a.type)
        p.launch(FILE, "embedding_ggml", variant, args, *in_neighbours(p, (n, indices.numel, 1)))
        p.check(partial(_refuse, rows), wrong, indices)
    return y


def _refuse(rows: int, wrong: Tensor, indices: Tensor) -> None:
    place = int(wrong)
    if place:
        index = int(indices.reshape(-1)[place - 1])
        refuse_index("embedding_ggml", index, f"a table of {rows} rows")
