# SPDX-License-Identifier: MIT
"""What can be said of a source without running it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .build import Builder
from .fit import Fit, fits_of
from .frontend.parse import Source
from .report import CompileError, Finding
from .static import static_findings


def fits(source: str, kernels: Collection[str] | None = None, **options: Any) -> dict[str, Fit]:
    """What each kernel of `source`, or of those named, takes of an Apple GPU: registers, the
    largest threadgroup that starts, bytes of code. Nothing is run.

    `options` are those of `compile_shader` that say how to read the source.
    """
    return fits_of(Builder(Source(source, **options), checked=False), kernels)


def lint(
    source: str,
    *,
    registers: bool = False,
    groups: Mapping[str, int] | None = None,
    **options: Any,
) -> list[Finding]:
    """Only the strictness findings of `source`, and its compile errors; with `registers` also what
    its kernels take of a GPU where that is too much: registers, memory, code, long divisions.

    `groups` are threads of the largest threadgroup by kernel, where it is not the one that the
    kernel declares. `options` are those of `compile_shader` that say how to read the source.
    """
    try:
        builder = Builder(Source(source, **options), checked=False)
        return builder.index.findings or (
            static_findings(builder, groups or {}) if registers else builder.errors()
        )
    except CompileError as error:
        return list(error.findings)
