# SPDX-License-Identifier: MIT
"""Bags of `size` rows of a table of [rows, n]."""

import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore
from metalcore._op import Op

from ..harness import Bench, nbytes


def _inputs(bags: int, size: int, n: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, n, dtype=dtype), torch.randint(rows, (bags, size))


def _run(table: Tensor, indices: Tensor) -> Tensor:
    return metalcore.embedding_bag(indices, table, mode="sum")


def _truth(table: Tensor, indices: Tensor) -> Tensor:
    flat, size = indices.reshape(-1), indices.shape[1]
    args = (table, flat, None, None, size, 0, -1, False, False, False)
    y: Tensor = Op.all["embedding_bag"].meaning(*args)[0]
    return y


BENCHES = tuple(
    Bench(
        op="train/embedding_bag",
        run=_run,
        peers={"torch": lambda table, indices: F.embedding_bag(indices, table, mode="sum")},
        inputs=_inputs,
        sweep=(
            {"bags": 8, "size": 4, "n": 16, "rows": 100},
            {"bags": 256, "size": 8, "n": 64, "rows": 5000},
            {"bags": 4096, "size": 32, "n": 128, "rows": 100_000},
        ),
        dtypes=(torch.float32, torch.bfloat16),
        truth=_truth,
        reduces_over=lambda table, indices: max(indices.shape),
        # a row per index, a row per bag and the indices; backward: also dy and the whole table
        bytes_moved=lambda table, indices, backward=backward: (
            (indices.numel() + indices.shape[0] * (2 if backward else 1)) * nbytes(table[0])
            + nbytes(indices)
            + (nbytes(table) if backward else 0)
        ),
        backward=backward,
    )
    for backward in (False, True)
)
