# SPDX-License-Identifier: MIT
"""A token of a made Llama of 850 million parameters, in 4 bits, after `tokens` of them."""

from functools import partial

import torch

from ..harness import Bench
from ._generation import by_tape, by_transformers, made, words

_WIDTH, _LAYERS = 2048, 16


def _bench(scheme: str) -> Bench:
    build = partial(made, _WIDTH, _LAYERS, scheme)
    plain = by_transformers(build)
    return Bench(
        op="program/generation",
        kind=scheme,
        run=by_tape(build),
        peers={"transformers": plain},
        inputs=words,
        sweep=({"tokens": 128}, {"tokens": 2000}),
        dtypes=(torch.float32,),
        # the same weights, whose products round activations to 16 bits
        truth=lambda prompt: plain.build(prompt)(prompt),
        reduces_over=lambda prompt: _WIDTH * (4 * _LAYERS) ** 2,
    )


BENCHES = tuple(map(_bench, ("q4_0", "q4_K")))
