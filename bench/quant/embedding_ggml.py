# SPDX-License-Identifier: MIT
"""Rows of a table [32000, 2048] in q6_K by index, beside rows of the same table in floats."""

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore.ops.quant.embedding_ggml import embedding_ggml
from metalcore.ops.quant.quantize_ggml import dequantize_ggml, quantize_ggml

from ..harness import Bench, nbytes


def _inputs(tokens: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    blocks = quantize_ggml(torch.randn(32000, 2048), "q6_K")
    return torch.randint(32000, (tokens,)), blocks, dequantize_ggml(blocks, "q6_K", dtype)


BENCHES = (
    Bench(
        op="quant/embedding_ggml",
        run=lambda at, blocks, table: embedding_ggml(at, blocks, "q6_K", table.dtype),
        peers={"torch": lambda at, blocks, table: F.embedding(at, table)},
        inputs=_inputs,
        sweep=({"tokens": 1}, {"tokens": 512}),
        dtypes=(torch.float32, torch.bfloat16),
        truth=lambda at, blocks, table: F.embedding(at, table),
        reduces_over=lambda at, blocks, table: 1,
        bytes_moved=lambda at, blocks, table: (
            at.numel() * (blocks.shape[1] + nbytes(table[0])) + nbytes(at)
        ),
    ),
)
