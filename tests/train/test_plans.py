# SPDX-License-Identifier: MIT
"""Launches of large tensors are whole, and those of large GPUs busy."""

from math import prod
from typing import Any

import torch

from metalcore.metal.plans import PLANS, Spec
from metalcore.metal.program import Launch, Program

F32, BF16 = torch.float32, torch.bfloat16
Args = tuple[Any, ...]


def _launches(op: str, args: Args, cores: int = 8) -> list[Launch]:
    program = PLANS[op].program(args, cores)
    assert isinstance(program, Program)
    return list(program.launches)


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
    x, w = Spec.contiguous((rows, n), BF16), Spec.contiguous((n,), BF16)
    each = Spec.contiguous((rows,))
    for op, args in {
        "rms_norm": (x, w, 1e-6, 0.0),
        "rms_norm_backward": (x, x, w, each, 0.0, x, True),
        "add_rms_norm": (x, x, w, 1e-6, 0.0),
        "layer_norm": (x, w, w, 1e-5),
        "layer_norm_backward": (x, x, w, w, each, each, x, True, True),
        "add_layer_norm": (x, x, w, w, 1e-5),
        "softmax": (x, Spec.contiguous((1, n), BF16), 1.0, True),
        "softmax_backward": (x, x, 1.0),
    }.items():
        for launch in _launches(op, args):
            numbers = [a for a in launch.args if type(a) is int]
            assert max(numbers, default=0) <= rows, launch.kernel


def test_large_gathers_count_in_64_bits() -> None:
    for outer, place in ((1, "uint"), (2**20, "ulong")):
        x, index = Spec.contiguous((outer, 5, 1024)), Spec.contiguous((7,), torch.int64)
        (launch,) = _launches("index_select", (x, index))
        assert launch.variant[1] == place
