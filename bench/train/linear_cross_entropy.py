# SPDX-License-Identifier: MIT
"""Cross entropy of a linear layer: hidden [tokens, width], weight [classes, width].

`python -m metalcore.bench.train.linear_cross_entropy [tokens width classes]` measures the memory
that forward and backward take above the inputs and the gradients, and the time, one process each.
"""

import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore

from ..harness import Bench


def _inputs(tokens: int, width: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    hidden = torch.randn(tokens, width, dtype=dtype)
    weight = torch.randn(classes, width, dtype=dtype).mul_(width**-0.5)
    return hidden, weight, torch.randint(0, classes, (tokens,))


def _torch(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


_MODULE = "metalcore.bench.train.linear_cross_entropy"
SIDES = {"metalcore": metalcore.linear_cross_entropy, "torch": _torch}

BENCHES = (
    Bench(
        op="train/linear_cross_entropy",
        run=metalcore.linear_cross_entropy,
        peers={"torch": _torch},
        inputs=_inputs,
        sweep=(
            {"tokens": 64, "width": 256, "classes": 1000},
            {"tokens": 512, "width": 512, "classes": 32000},
        ),
        dtypes=(torch.float32, torch.bfloat16),
        truth=_torch,
        reduces_over=lambda hidden, weight, target: max(*hidden.shape, *weight.shape),
        # three products: logits, dhidden and dweight
        flops=lambda hidden, weight, target: 6 * hidden.shape[0] * weight.numel(),
        backward=True,
    ),
)


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _measure(side: str, tokens: int, width: int, classes: int) -> dict[str, float]:
    """In this process: bytes above inputs and gradients, and seconds, of one training step."""
    # a small step first, which loads what any step needs
    for size in ((8, 16, 32), (tokens, width, classes)):
        hidden, weight, target = _inputs(*size, torch.float32)
        # written once, so that the peak before the step has the gradients in it
        gradients = [torch.ones_like(hidden), torch.ones_like(weight)]
        before = _peak_bytes()
        del gradients
        hidden.requires_grad_()
        weight.requires_grad_()
        start = time.perf_counter()
        SIDES[side](hidden, weight, target).backward()
        seconds = time.perf_counter() - start
    return {"bytes": _peak_bytes() - before, "seconds": seconds}


def measured(side: str, *size: int, env: dict[str, str] | None = None) -> dict[str, Any]:
    """`_measure` in a process of its own, because a peak never falls."""
    command = [sys.executable, "-m", _MODULE, side, *map(str, size)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    result: dict[str, Any] = json.loads(run.stdout)
    return result


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in SIDES:
        print(json.dumps(_measure(sys.argv[1], *map(int, sys.argv[2:]))))
    else:
        size = [int(a) for a in sys.argv[1:]] or [2048, 2048, 128256]
        ours, theirs = (measured(side, *size) for side in SIDES)
        print(
            f"memory: {ours['bytes'] / theirs['bytes']:.1%} of torch's {theirs['bytes'] >> 20} MiB"
        )
        print(f"time: {theirs['seconds'] / ours['seconds']:.2f}x as fast as torch")
