# SPDX-License-Identifier: MIT
"""A token of a made Llama in float32, after 128 others: a small one of 16 layers, a wider one."""

from functools import partial

import torch

from ..harness import Bench
from ..program._generation import by_tape, by_transformers, made, words


def _bench(width: int, layers: int) -> Bench:
    build = partial(made, width, layers, "")
    plain = by_transformers(build)
    return Bench(
        op="decode/decode_step",
        kind=f"{layers} layers of {width}",
        run=by_tape(build),
        peers={"transformers": plain},
        inputs=words,
        sweep=({"tokens": 128},),
        dtypes=(torch.float32,),
        truth=lambda prompt: plain.build(prompt)(prompt),
        reduces_over=lambda prompt: width * (4 * layers) ** 2,
    )


BENCHES = (_bench(64, 16), _bench(1024, 2))
