# SPDX-License-Identifier: MIT
"""Cross entropy of logits [rows, classes]."""

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes


def _inputs(rows: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, classes, dtype=dtype), torch.randint(0, classes, (rows,))


BENCHES = tuple(
    Bench(
        op="train/cross_entropy",
        run=metalcore.cross_entropy,
        peers={"torch": torch.nn.functional.cross_entropy},
        inputs=_inputs,
        sweep=tuple(
            {"rows": rows, "classes": classes}
            for rows, classes in ((1, 10), (8, 1000), (64, 16384), (64, 32000), (256, 128256))
        ),
        dtypes=(torch.float32, torch.bfloat16),
        truth=torch.nn.functional.cross_entropy,
        reduces_over=lambda x, target: x.shape[-1],
        # forward: logits in; backward: also their gradient out, computed in the forward pass
        bytes_moved=lambda x, target, passes=passes: passes * nbytes(x),
        backward=backward,
    )
    for backward, passes in ((False, 1), (True, 2))
)
