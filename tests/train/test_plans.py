# SPDX-License-Identifier: MIT
"""Launches of the shapes that models have: they start on an M1, and large tensors are whole."""

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from math import prod
from typing import Any

import pytest
import torch

import mslsim
from metalcore.metal import source
from metalcore.metal.plans import PLANS, Spec
from metalcore.metal.program import Launch, Program
from metalcore.metal.run import has_metal_kernels

F32, BF16 = torch.float32, torch.bfloat16
HIDDEN = [(64, F32), (4096, F32), (4096, BF16), (4098, F32), (16384, F32), (16384, BF16)]
CLASSES = [(1000, F32), (32000, BF16), (50257, F32), (128256, F32), (262144, BF16)]
ROWS = 512

Args = tuple[Any, ...]


def _launches(op: str, args: Args, cores: int = 8) -> list[Launch]:
    program = PLANS[op].program(args, cores)
    assert isinstance(program, Program)
    return list(program.launches)


def _hidden(n: int, dtype: torch.dtype) -> Iterator[tuple[str, Args]]:
    x, w = Spec.contiguous((ROWS, n), dtype), Spec.contiguous((n,), dtype)
    each = Spec.contiguous((ROWS,))
    yield "rms_norm", (x, w, 1e-6, 0.0)
    yield "rms_norm_backward", (x, x, w, each, 0.0, x, True)
    yield "add_rms_norm", (x, x, w, 1e-6, 0.0)
    yield "layer_norm", (x, w, w, 1e-5)
    yield "layer_norm_backward", (x, x, w, w, each, each, x, True, True)
    yield "add_layer_norm", (x, x, w, w, 1e-5)
    yield "softmax", (x, None, 1.0, False)
    yield "softmax", (x, Spec.contiguous((1, n), dtype), 1.0, True)
    yield "softmax_backward", (x, x, 1.0)
    yield "swiglu", (x, x)
    yield "swiglu_backward", (x, x, x)


def _classes(n: int, dtype: torch.dtype) -> Iterator[tuple[str, Args]]:
    x, target = Spec.contiguous((ROWS, n), dtype), Spec.contiguous((ROWS,), torch.int64)
    weight = Spec.contiguous((n,))
    yield "softmax", (x, None, 1.0, False)
    yield "cross_entropy", (x, target, None, None, -100, 0.0, 0.0, 0.0, 1, True)
    yield "cross_entropy", (x, target, weight, None, -100, 0.1, 1e-4, 30.0, 1, True)


def _shapes() -> Iterator[tuple[str, Args]]:
    for n, dtype in HIDDEN:
        yield from _hidden(n, dtype)
    for n, dtype in CLASSES:
        yield from _classes(n, dtype)
    for dtype in (F32, BF16):
        q, table = Spec.contiguous((2, 32, 512, 128), dtype), Spec.contiguous((512, 128), dtype)
        for interleaved in (False, True):
            yield "rope", (q, q, table, table, None, 1, 128, interleaved, False)


@cache
def _by_file() -> dict[str, dict[tuple[str, source.Variant], int]]:
    """Of each file, the largest group of each of its kernels."""
    found: dict[str, dict[tuple[str, source.Variant], int]] = defaultdict(dict)
    for op, args in _shapes():
        for launch in _launches(op, args):
            kernel, size = (launch.function, launch.variant), prod(launch.group)
            found[launch.file][kernel] = max(size, found[launch.file].get(kernel, 0))
    return found


@pytest.mark.parametrize("file", sorted(_by_file()))
def test_groups_start_with_room_for_another_compiler(file: str) -> None:
    kernels = _by_file()[file]
    text = source.read(file) + "".join(source.instantiation(file, *kernel) for kernel in kernels)
    fits = mslsim.fits(text)
    for kernel, size in kernels.items():
        name = source.kernel_name(file, *kernel)
        assert fits[name].fits(size), (name, size, fits[name])
        if has_metal_kernels():
            assert size <= source.kernel(file, *kernel).max_threads_per_threadgroup, name


def test_a_larger_gpu_gets_more_blocks_of_rows() -> None:
    rows = 8 * 8 * 8 * 76
    x, w, each = (Spec.contiguous(size) for size in ((rows, 4096), (4096,), (rows,)))
    args = (x, x, w, each, 0.0, None, True)
    small, large = (_launches("rms_norm_backward", args, cores)[0] for cores in (8, 76))
    groups = [prod(launch.threads) // prod(launch.group) for launch in (small, large)]
    assert [n % cores for n, cores in zip(groups, (8, 76), strict=True)] == [0, 0]
    assert groups[1] > groups[0]


# More values than 32 bits count, in rows of a common length and in one that no chunk divides.
MANY = 2**32 + 2**21 + 3


def test_large_tensors_of_values_take_several_launches() -> None:
    for op, inputs in (("silu", 1), ("swiglu", 2), ("swiglu_backward", 3)):
        launches = _launches(op, (Spec.contiguous((MANY,), BF16),) * inputs)
        starts = [launch.args[0].offset for launch in launches]  # type: ignore[union-attr]
        sizes = [launch.args[0].numel for launch in launches]  # type: ignore[union-attr]
        assert len(launches) == 3
        assert starts == [0, sizes[0], sizes[0] + sizes[1]]
        assert sum(sizes) == MANY
        assert all(prod(launch.threads) >= n for launch, n in zip(launches, sizes, strict=True))
    bias = Spec.contiguous((4099,), BF16)
    x = Spec.contiguous((2**32 // 4099 + 9, 4099), BF16)
    starts = [launch.args[0].offset for launch in _launches("bias_silu", (x, bias))]  # type: ignore[union-attr]
    assert len(starts) > 1
    assert all(start % 4099 == 0 for start in starts)


def test_large_tensors_of_rows_are_counted_row_by_row() -> None:
    rows, n = 2**20 + 1, 8192
    x, each = Spec.contiguous((rows, n), BF16), Spec.contiguous((rows,))
    for op, args in _hidden(n, BF16):
        if op.startswith("swiglu"):
            continue
        large = tuple(_grown(a, x, each) for a in args)
        for launch in _launches(op, large):
            numbers = [a for a in launch.args if type(a) is int]
            assert max(numbers, default=0) <= rows, launch.kernel


def _grown(a: Any, x: Spec, each: Spec) -> Any:
    if isinstance(a, Spec) and a.shape[0] == ROWS:
        return x if len(a.shape) == 2 else each
    return a


def test_large_gathers_count_in_64_bits() -> None:
    for outer, place in ((1, "uint"), (2**20, "ulong")):
        x, index = Spec.contiguous((outer, 5, 1024)), Spec.contiguous((7,), torch.int64)
        (launch,) = _launches("index_select", (x, index))
        assert launch.variant[1] == place
