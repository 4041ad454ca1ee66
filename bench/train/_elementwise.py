# SPDX-License-Identifier: MIT
"""Functions of one or two tensors, element by element, [rows, n]."""

import torch
from torch import Tensor

from ..harness import Bench, Function, nbytes


def elementwise(
    op: str, run: Function, plain: Function, *, tensors: int = 1, kind: str = ""
) -> tuple[Bench, ...]:
    """`run` against the same in torch, forward and with gradients, for so many input tensors."""

    def inputs(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(torch.randn(rows, n, dtype=dtype) for _ in range(tensors))

    widest = {"rows": 1024, "n": 4096 if tensors == 1 else 11008}
    # forward: all in, one out; backward: all and dy in, all gradients out
    forward, backward = tensors + 1, 2 * tensors + 1
    return tuple(
        Bench(
            op=op,
            kind=kind,
            run=run,
            peers={"torch": plain},
            inputs=inputs,
            sweep=({"rows": 1, "n": 64}, {"rows": 32, "n": 1024}, widest),
            dtypes=(torch.float32, torch.bfloat16),
            truth=plain,
            reduces_over=lambda *inputs: 1,
            bytes_moved=lambda x, *_, passes=passes: passes * nbytes(x),
            backward=passes > forward,
            compiled_at=widest,
        )
        for passes in (forward, forward + backward)
    )
