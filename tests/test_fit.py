# SPDX-License-Identifier: MIT
"""Every launch of every plan starts on an M1 or M2, for the shapes that models use.

Nothing is run: mslsim estimates the registers of kernels, and on a Mac their pipelines are asked.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, product
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

import mslsim
from metalcore._op import Op
from metalcore.metal import plans, source
from metalcore.metal.plans import PLANS, Spec
from metalcore.metal.program import MSL_TYPE, Program

HIDDEN = [64, 65, 127, 128, 250, 512, 1000, 1024, 2047, 2048, 4096, 5461, 8192, 11008, 16384]
VOCABULARY = [32000, 50257, 100277, 128256, 151936, 262144]
MATRICES = [1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 48, 64, 65, 96, 300]
ROWS = [1, 4096]
BATCHES = [1, 64, 4096]
MOST_COMBINATIONS = 16
# In the examples of ops: a row's length, and the size that matrices are counted from.
ROW, MATRIX, BATCH = 1000, 9, 5
HEADS = [64, 80, 96, 128, 256]
# Bags without offsets, and packed sequences without starts, are of another shape; scales are two.
SHAPING = ("offsets", "per_sample_weights", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "v_scale")


def _shaped(args: Sequence[Any], sizes: dict[int, int]) -> list[Any]:
    """Arguments with other sizes, as Specs."""

    def shaped(a: Any) -> Any:
        if isinstance(a, Tensor):
            return Spec.contiguous([sizes.get(n, n) for n in a.shape], a.dtype)
        return [shaped(t) for t in a] if isinstance(a, list | tuple) else a

    return [shaped(a) for a in args]


def _options(op: str, args: Sequence[Any]) -> Iterator[list[Any]]:
    """The same call with flags the other way, without optional tensors, and without terms."""
    choices = []
    for argument, a in zip(Op.all[op].arguments, args, strict=True):
        kind = str(argument.type)
        if kind == "bool":
            choices.append([True, False])
        elif argument.name in ("label_smoothing", "z_loss", "softcap", "beta"):
            choices.append([a, 0.0])
        elif kind == "Optional[Tensor]" and argument.name not in SHAPING:
            choices.append([a, None])
        else:
            choices.append([a])
    if prod(map(len, choices)) <= MOST_COMBINATIONS:
        yield from map(list, product(*choices))
        return
    # all, none, and from either the other way one by one
    for start in ([c[0] for c in choices], [c[-1] for c in choices]):
        yield start
        for i, choice in enumerate(choices):
            for other in choice:
                if other is not start[i]:
                    yield [*start[:i], other, *start[i + 1 :]]


def _sizes(args: Sequence[Any], op: str) -> Iterator[dict[int, int]]:
    """What to put for the sizes of an example."""
    shapes = [tuple(t.shape) for a in args for t in (a if isinstance(a, list) else [a])
              if isinstance(t, Tensor)]  # fmt: skip
    found = {n for shape in shapes for n in shape}
    if ROW in found:
        wide = "entropy" in op or op.startswith(("softmax", "kl_div", "jsd"))
        for n, rows in product([*HIDDEN, *(VOCABULARY if wide else [])], ROWS):
            yield {ROW: n, BATCH: rows}
    elif Op.all[op].story.startswith("linalg"):
        batch = shapes[0][0]
        others = found - {batch}
        for n, b in product(MATRICES, BATCHES):
            # large ones take many launches
            if n <= 64 or b == 1:
                yield {batch: b, **{m: max(1, m * n // MATRIX) for m in others}}
                yield {batch: b, **dict.fromkeys(others, n)}
    else:
        for factor in (1, 4, 16, 50, 333):
            yield {n: n * factor for n in found if n > 3}


def _calls(op: str, dtype: torch.dtype) -> Iterator[list[Any]]:
    for sample in Op.all[op].samples:
        args = sample(dtype).args
        if op == "rope":
            for head, options in product(HEADS, _options(op, args)):
                sizes = {40: head, 16: head // 2}
                yield [head if a == 32 and type(a) is int else a for a in _shaped(options, sizes)]
            continue
        for sizes in _sizes(args, op):
            for options in _options(op, args):
                yield _shaped(options, sizes)


def _programs() -> Iterator[Program]:
    for op, dtype in product(PLANS, MSL_TYPE):
        # matrices of half types are factored as float
        if Op.all[op].story.startswith("linalg") and dtype != torch.float32:
            continue
        planned = (PLANS[op].program(args) for args in _calls(op, dtype))
        yield from (program for program in planned if isinstance(program, Program))


@cache
def launched() -> dict[str, dict[tuple[str, source.Variant], int]]:
    """The kernels of each file that any plan starts, with the largest of their groups."""
    found: dict[str, dict[tuple[str, source.Variant], int]] = {}
    for program in chain(plans.examples(), _programs()):
        for launch in program.launches:
            kernels = found.setdefault(launch.file, {})
            kernel = (launch.function, launch.variant)
            kernels[kernel] = max(prod(launch.group), kernels.get(kernel, 0))
    return found


@pytest.mark.parametrize("file", source.files())
def test_every_kernel_fits(file: str) -> None:
    kernels = launched()[file]
    assert {function for function, _ in kernels} == set(source.signatures(file))
    text = source.read(file) + "".join(source.instantiation(file, *kernel) for kernel in kernels)
    groups = {source.kernel_name(file, *kernel): group for kernel, group in kernels.items()}
    assert mslsim.lint(text, registers=True, groups=groups, name=file) == []
    if torch.backends.mps.is_available():
        for (function, variant), group in kernels.items():
            kernel = source.kernel(file, function, variant)
            assert group <= kernel.max_threads_per_threadgroup, (function, variant)
