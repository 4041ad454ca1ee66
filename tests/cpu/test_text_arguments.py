# SPDX-License-Identifier: MIT
"""Kernels that take a text leave none of it in memory."""

import ctypes
from collections.abc import Callable

import pytest
import torch

import metalcore
from metalcore.ops.decode.decode_step import small_tape, tape_end

CALLS = 2000


class _Memory(ctypes.Structure):
    """`struct mallinfo2`."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in "abcdefghij")


def bytes_in_use() -> int:
    """What is allocated by malloc in all threads, and not freed."""
    count = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if count is None:
        pytest.skip("the C library does not count")
    count.restype = _Memory
    found = count()
    # in arenas (uordblks), and in maps of their own (hblkhd)
    return int(found.h) + int(found.e)


def _products() -> dict[str, Callable[[], object]]:
    x, weight = torch.randn(2, 64), torch.randn(16, 64)
    blocks, four = metalcore.quantize_ggml(weight, "q4_0"), metalcore.quantize_int4(weight, 32)
    tiles, packed = metalcore.pack_ggml(blocks, "q4_0"), metalcore.pack_int4(four)
    matrices = torch.randn(20, 4, 4)
    tape, cache = small_tape(torch.float32), torch.zeros(1, 2, 1, 2, 9, 8)
    number = metalcore.precise.DoubleFloat(torch.randn(4))
    text, zero = tape.text(tape_end(tape)), torch.zeros(1, dtype=torch.int64)
    return {
        "matmul_ggml": lambda: metalcore.matmul_ggml(x, blocks, "q4_0", tiles=tiles),
        "matmul_int4": lambda: metalcore.matmul_int4(x, four, tiles=packed),
        "qr": lambda: metalcore.qr(matrices),
        "double_float": lambda: number + number,
        "decode_step": lambda: metalcore.decode_step(text, tape.tensors, cache, *[zero] * 4),
    }


@pytest.mark.parametrize("op", ["matmul_ggml", "matmul_int4", "qr", "double_float", "decode_step"])
def test_calls_leave_nothing_behind(op: str) -> None:
    call = _products()[op]
    with metalcore.trace() as t:
        call()
    assert all(path.startswith("cpu") for path in t.paths[op])
    for _ in range(200):
        call()
    before = bytes_in_use()
    for _ in range(CALLS):
        call()
    # a string object alone has 32 bytes
    assert bytes_in_use() - before < CALLS * 8
