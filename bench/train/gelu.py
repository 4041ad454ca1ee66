# SPDX-License-Identifier: MIT
"""GELU, exact and by tanh, [rows, n]."""

from functools import partial

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes


def _inputs(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor]:
    return (torch.randn(rows, n, dtype=dtype),)


BENCHES = tuple(
    Bench(
        op="train/gelu",
        kind="" if kind == "none" else kind,
        run=partial(metalcore.gelu, approximate=kind),
        peers={"torch": partial(torch.nn.functional.gelu, approximate=kind)},
        inputs=_inputs,
        sweep=({"rows": 1, "n": 64}, {"rows": 32, "n": 1024}, {"rows": 1024, "n": 4096}),
        dtypes=(torch.float32, torch.bfloat16),
        truth=partial(torch.nn.functional.gelu, approximate=kind),
        reduces_over=lambda *inputs: 1,
        # forward: one in, one out; backward: two in, one out
        bytes_moved=lambda x, *_, passes=passes: passes * nbytes(x),
        backward=backward,
        compiled_at={"rows": 1024, "n": 4096},
    )
    for kind in ("none", "tanh")
    for backward, passes in ((False, 2), (True, 5))
)
