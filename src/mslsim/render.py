# SPDX-License-Identifier: MIT
"""Fragment functions as image kernels: one pass over all pixels of a picture."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from .build import headers
from .compiler import toolchain
from .frontend.parse import Source, parse
from .library import run
from .report import CompileError, Finding, Report
from .text.fragments import Fragment, NoFragment, find_fragment
from .texture import Sampler

# Two pixels wide, so that a quad of lanes is a square of pixels.
_GROUP = (2, 16, 1)


def render(
    source: str,
    fragment: str,
    target: Any,
    args: Sequence[Any] = (),
    *,
    inputs: Mapping[str, Any] | None = None,
    textures: Mapping[int, Any] | None = None,
    samplers: Mapping[int, Sampler] | None = None,
    checks: str | Collection[str] = "all",
    **options: Any,
) -> Report:
    """Runs a fragment function for every pixel of `target`, which is changed in place.

    `target` is an array of rows, columns and channels, or a dict of them by color. `inputs` are
    what a vertex function would hand over, by the member's name: a value, or four of them at the
    corners (upper left and right, lower left and right), interpolated between. `args` are the
    buffers; `options` are those of `compile_shader`.
    """
    targets = dict(target) if isinstance(target, Mapping) else {0: target}
    given = dict(inputs or {})
    shapes = {np.shape(t)[:2] for t in targets.values()}
    if len(shapes) != 1:
        raise ValueError(f"{fragment}: targets must have the same rows and columns")
    (rows, columns), *_ = shapes
    options["defines"] = {**(options.get("defines") or {}), "fragment": ""}
    try:
        found = _find(source, fragment, given, options)
    except CompileError as error:
        return Report(fragment, list(error.findings))
    if missing := set(found.targets) ^ set(targets):
        raise ValueError(f"{fragment}: color({min(missing)}) is written or given, but not both")
    buffers = [*args, *[None] * (found.corners - len(args))]
    buffers += [_corners(found, given), np.array([columns, rows], np.uint32)]
    images = {**(textures or {}), **{found.targets[c]: t for c, t in targets.items()}}
    # Derivatives need whole squares.
    unit = 2 if found.has_derivatives else 1
    threads = (-(-columns // unit) * unit, -(-rows // unit) * unit, 1)
    text = f'{source}\n# 1 "render"\nusing namespace metal;\n{found.text}'
    report = run(text, found.kernel, buffers, threads, _GROUP, checks=checks, textures=images,
                 samplers=samplers, **options)  # fmt: skip
    report.kernel = fragment
    return report


def _find(
    source: str, name: str, inputs: Mapping[str, Any], options: Mapping[str, Any]
) -> Fragment:
    defines = {k: v for k, v in options["defines"].items() if k != "fragment"}
    known = {k: options[k] for k in ("name", "include", "version") if k in options}
    text = Source(source, defines=defines, strict=False, **known)
    try:
        return find_fragment(parse(text, toolchain(), headers() / "metal").stream, name, inputs)
    except NoFragment as problem:
        raise CompileError([Finding("compile", str(problem), name)]) from None


def _corners(found: Fragment, inputs: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Four values of four channels for each input."""
    corners = np.zeros((max(1, len(found.inputs)), 4, 4), np.float32)
    for at, (name, channels) in enumerate(found.inputs.items()):
        value = np.asarray(inputs[name], np.float32)
        if value.size not in (channels, 4 * channels):
            raise ValueError(f"inputs[{name!r}] must be {channels} or 4 x {channels} numbers")
        corners[at, :, :channels] = value.reshape(-1, channels)
    return corners
