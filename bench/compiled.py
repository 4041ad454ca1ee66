# SPDX-License-Identifier: MIT
"""torch.compile as a peer: what its compiler makes of the same function in plain torch."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from .harness import Bench, Built, Function


def against_compiler(benches: Sequence[Bench]) -> list[Bench]:
    """A benchmark for each that says where it is `compiled_at`: its peer `torch`, compiled.

    They have to come last: torch._dynamo, once loaded, makes every call of Python dearer. At the
    sizes compared here that does not show.
    """
    return [
        replace(
            bench,
            kind=f"{bench.kind}, compiler".removeprefix(", "),
            peers={"torch.compile": Built(partial(_compiled, bench.peers["torch"]))},
            sweep=(bench.compiled_at,),
            dtypes=bench.dtypes[:2],
        )
        for bench in benches
        if bench.compiled_at is not None
    ]


def _compiled(function: Function, *inputs: Any) -> Function:
    import torch._dynamo
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if all(x.is_cpu for x in inputs):
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise RuntimeError(
                "torch.compile needs a C++ compiler; install g++ or name one in CXX"
            ) from None
    # what was compiled for an earlier case counts towards a limit
    torch._dynamo.reset()
    return torch.compile(lambda *x: function(*x), fullgraph=True, dynamic=False)
