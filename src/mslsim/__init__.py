# SPDX-License-Identifier: MIT
"""mslsim: runs Metal compute kernels on the CPU and finds what is wrong with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .arguments import uninitialized
from .compiler import CompilerMissing
from .frontend import Source
from .library import Kernel, Library, chosen_checks
from .registers import arrays_in_memory
from .report import CompileError, Finding, KernelError, LaunchError, Report

__all__ = [
    "CompileError",
    "CompilerMissing",
    "Finding",
    "Kernel",
    "KernelError",
    "LaunchError",
    "Library",
    "Report",
    "compile_shader",
    "lint",
    "run",
    "uninitialized",
]

# Seconds without progress after which a checked kernel counts as hanging.
DEFAULT_TIMEOUT = 20.0


def compile_shader(
    source: str,
    checks: str | Collection[str] = "all",
    *,
    include: Sequence[str] = (),
    defines: Mapping[str, str | int | float] | None = None,
    constants: Mapping[int, bool | int | float] | None = None,
    strict: bool = True,
    on_finding: str = "raise",
    name: str = "source.metal",
    version: int = 320,
    timeout: float = DEFAULT_TIMEOUT,
) -> Library:
    """Compiles Metal source to a library whose kernels are called as torch.mps calls them.

    Args:
        source: Metal text.
        checks: "all", "none" (fast, in this process), or a set of check names.
        include: folders for `#include "..."`.
        defines: preprocessor macros.
        constants: values of function constants by index.
        strict: refuse what Apple's compiler refuses though C++ allows it.
        on_finding: "raise" a KernelError, or "collect" into the returned Report.
        name: what messages call the source.
        version: value of __METAL_VERSION__.
        timeout: seconds without progress before a checked kernel is stopped.
    """
    if on_finding not in ("raise", "collect"):
        raise ValueError(f"on_finding must be 'raise' or 'collect', got {on_finding!r}")
    text = Source(source, name, include, defines or {}, constants or {}, version, strict)
    return Library(text, chosen_checks(checks), on_finding, timeout)


def run(
    source: str,
    kernel: str,
    args: Sequence[Any],
    threads: Any,
    group_size: Any,
    *,
    checks: str | Collection[str] = "all",
    arg_casts: Mapping[int, str] | str | None = None,
    threadgroup_memory: Mapping[int, int] | None = None,
    order: str = "ascending",
    **options: Any,
) -> Report:
    """Compiles and runs one kernel; every finding, of any stage, is in the report.

    `options` are those of `compile_shader`.
    """
    try:
        library = compile_shader(source, checks, **options)
        return library[kernel].run(args, threads, group_size, arg_casts, threadgroup_memory, order)
    except (CompileError, LaunchError) as error:
        return Report(kernel, list(error.findings))


def lint(source: str, *, registers: bool = False, **options: Any) -> list[Finding]:
    """Only the strictness findings of `source`, and its compile errors; with `registers` also the
    arrays of its kernels that are in memory, because an index is no constant."""
    try:
        library = compile_shader(source, "none", **options)
        if registers:
            return arrays_in_memory(library._builder)
        for name in dir(library):
            library[name]._build()
    except CompileError as error:
        return list(error.findings)
    return []
