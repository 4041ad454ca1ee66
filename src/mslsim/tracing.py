# SPDX-License-Identifier: MIT
"""Traces one thread of a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .library import compile_shader
from .report import Report


def trace(
    source: str,
    kernel: str,
    args: Sequence[Any],
    threads: Any,
    group_size: Any,
    thread: Sequence[int] = (0, 0, 0),
    **options: Any,
) -> Report:
    """Runs a kernel and lists in `Report.steps` what one thread does: loads and stores with their
    values, the lines that its branches go to, barriers and simd operations.

    Args:
        source: Metal text.
        kernel: its name.
        args: arguments, which are changed in place.
        threads: size of the grid.
        group_size: size of a threadgroup.
        thread: position of the thread in the grid.
        **options: those of `compile_shader` and of a launch.

    Returns:
        A report, whose findings are accesses out of bounds, divergence and crashes.

    Example:
        >>> report = mslsim.trace(source, "scale", [x, 3.0], 64, 32, thread=(5,))
        >>> print(*report.steps, sep="\\n")
    """
    launch = {
        name: options.pop(name)
        for name in ("arg_casts", "threadgroup_memory", "order", "textures", "samplers")
        if name in options
    }
    options.pop("checks", None)
    library = compile_shader(source, {"bounds", "divergence"}, **options)
    return library[kernel].run(args, threads, group_size, thread=thread, **launch)
