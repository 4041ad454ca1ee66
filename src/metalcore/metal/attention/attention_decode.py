# SPDX-License-Identifier: MIT
"""Program of attention_decode."""

from typing import Any

from metalcore.metal.attention._over_cache import STORED, OverCache, integers
from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import Arguments, Program

FILE = "attention/attention_decode.metal"


@metal_kernel("attention_decode")
def plan(p: Program, a: Arguments) -> Any:
    if a.k.dtype not in STORED:
        return NotImplemented
    entries, capacity = a.k.shape[0], a.k.shape[2]
    call = OverCache(p, a, (a.k, a.v), (a.k_scale, a.v_scale), entries, capacity)
    lengths, has_lengths = integers(p, a.lengths), a.lengths is not None
    # of the merge: lengths, which are no starts; queries are not packed
    merge = ((has_lengths, False, False), lengths, lengths)
    return call.run(FILE, "attention_decode", (has_lengths,), (lengths,), merge)
