# SPDX-License-Identifier: MIT
"""A pytest fixture that runs a Metal kernel under all checks and compares it with a reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from numpy.random import Generator

# numpy is imported when the fixture is used: pytest loads this module wherever it is installed.
Make = Callable[[int, "Generator"], Sequence[Any]]
Reference = Callable[..., Mapping[int, Any]]
Launch = Callable[..., None]


def ragged_sizes(group: int, generator: Generator) -> list[int]:
    """Those that fill no group first, then whole groups, then any."""
    drawn = sorted({int(n) for n in generator.integers(2, 5 * group, 2)})
    return [1, max(1, group - 1), group + 1, group, *drawn]


@pytest.fixture
def mslsim_launch() -> Launch:
    """`mslsim_launch(source, kernel, make, reference, group_size=32)` runs a kernel for several
    sizes: `make(n, generator)` gives its arguments, `reference(*arguments)` the arrays that they
    are to become, by index. A finding fails the test, and so does a result that differs."""

    def launch(
        source: str,
        kernel: str,
        make: Make,
        reference: Reference,
        *,
        group_size: int = 32,
        threads: Callable[[int], Any] | None = None,
        sizes: Sequence[int] | None = None,
        rtol: float = 1e-5,
        atol: float = 1e-6,
        seed: int = 0,
        **options: Any,
    ) -> None:
        import numpy as np

        from .library import run
        from .memory import Uninitialized

        generator = np.random.default_rng(seed)
        for n in sizes or ragged_sizes(group_size, generator):
            arguments = list(make(n, generator))
            wanted = reference(*copy.deepcopy(arguments))
            grid = threads(n) if threads else -(-n // group_size) * group_size
            report = run(source, kernel, arguments, grid, group_size, **options)
            assert report.ok, f"n = {n}:\n{report}"
            for index, values in wanted.items():
                given = arguments[index]
                given = given.array if isinstance(given, Uninitialized) else given
                np.testing.assert_allclose(
                    given, values, rtol=rtol, atol=atol, err_msg=f"argument {index}, n = {n}"
                )

    return launch
