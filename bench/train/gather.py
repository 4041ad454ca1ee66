# SPDX-License-Identifier: MIT
"""gather along the last dimension, [rows, n] to [rows, count]; its gradient is scatter_add."""

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes


def _inputs(rows: int, n: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, n, dtype=dtype), torch.randint(n, (rows, count))


BENCHES = tuple(
    Bench(
        op="train/gather",
        run=lambda x, index: metalcore.gather(x, 1, index),
        peers={"torch": lambda x, index: torch.gather(x, 1, index)},
        inputs=_inputs,
        sweep=({"rows": 8, "n": 16, "count": 4}, {"rows": 4096, "n": 1024, "count": 256}),
        dtypes=(torch.float32, torch.bfloat16),
        truth=lambda x, index: torch.gather(x, 1, index),
        reduces_over=lambda x, index: index.shape[1],
        # index, what is picked, and y; backward: also dy, the index again and the gradient
        bytes_moved=lambda x, index, backward=backward: (
            (2 if backward else 1) * (nbytes(index) + 2 * index.numel() * x.element_size())
            + (nbytes(x) if backward else 0)
        ),
        backward=backward,
    )
    for backward in (False, True)
)
