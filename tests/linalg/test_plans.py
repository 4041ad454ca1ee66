# SPDX-License-Identifier: MIT
"""Kernels of every size of matrix: their groups start on an M1, and their code is small."""

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from math import prod
from typing import Any

import pytest

import mslsim
from metalcore.metal import source
from metalcore.metal.plans import PLANS, Spec
from metalcore.metal.run import has_metal_kernels

# What M1 and M2 keep of a program at hand, and what all of one may take.
LOOP_BYTES, CODE_BYTES = 12 * 1024, 48 * 1024

F32 = Spec.contiguous


def _of_size(n: int, batch: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    A, tall = F32((batch, n, n)), F32((batch, n + 8, n))
    v, tau = F32((batch, n)), F32((batch,))
    yield "cholesky", (A, False)
    yield "lu", (A,)
    yield "det", (A,)
    yield "eigh", (A, False)
    yield "eigvalsh", (A, False)
    yield "orthogonalize", (tall,)
    yield "householder_vector", (v,)
    for sides in (1, 300):
        B = F32((batch, n, sides))
        yield "cholesky_solve", (B, A, False)
        yield "trsm", (A, B, True, False, False)
        yield "trsm", (A, B, False, True, True)
        for refine in (False, True):
            yield "solve", (A, B, refine)
    for matrix in (A, tall):
        yield "qr", (matrix, "complete")
        yield "svd", (matrix, True)
        yield "svdvals", (matrix,)
        yield "svd_solve", (matrix, F32((*matrix.shape[:2], 3)), tau)
    for left in (True, False):
        yield "apply_householder", (A, v, tau, left)


@cache
def _by_file() -> dict[str, dict[tuple[str, source.Variant], int]]:
    """Of each file, the largest group of each of its kernels."""
    found: dict[str, dict[tuple[str, source.Variant], int]] = defaultdict(dict)
    for n, batch in ((8, 64), (16, 1000), (32, 64), (64, 3), (300, 1)):
        for op, args in _of_size(n, batch):
            program = PLANS[op].program(args)
            assert program is not None
            for launch in program.launches:
                kernel, size = (launch.function, launch.variant), prod(launch.group)
                found[launch.file][kernel] = max(size, found[launch.file].get(kernel, 0))
    return found


@pytest.mark.parametrize("file", sorted(_by_file()))
def test_groups_start_and_code_is_small(file: str) -> None:
    kernels = _by_file()[file]
    text = source.read(file) + "".join(source.instantiation(file, *kernel) for kernel in kernels)
    fits = mslsim.fits(text)
    for kernel, size in kernels.items():
        name = source.kernel_name(file, *kernel)
        fit = fits[name]
        assert fit.fits(size), (name, size, fit)
        assert fit.code_bytes <= CODE_BYTES, (name, fit)
        assert fit.loop_bytes <= LOOP_BYTES, (name, fit)
        assert (fit.divisions, fit.arrays, fit.spills) == ((), (), 0), (name, fit)
        if has_metal_kernels():
            assert size <= source.kernel(file, *kernel).max_threads_per_threadgroup, name


@pytest.mark.parametrize("op", ["cholesky", "svdvals", "eigh"])
def test_a_matrix_of_more_values_than_32_bits_count_is_refused(op: str) -> None:
    flags = () if op == "svdvals" else (False,)
    with pytest.raises(ValueError, match="up to 4294967295 values, got 65536 x 65536"):
        PLANS[op].program((F32((1, 2**16, 2**16)), *flags))
