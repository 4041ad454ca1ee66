# SPDX-License-Identifier: MIT
"""Inside `metalcore.simulate()`, mslsim runs the very Metal text that MLX makes of our kernels.

MLX tells that text without a GPU: it prints it where a call is exported and `verbose`.
"""

import ctypes
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch

import mslsim
from metalcore import _torch
from metalcore._check import refuse
from metalcore._simulate import simulate
from metalcore.mlx import _kernel, _ways
from metalcore.mlx.exchange import MLX, from_torch, to_torch, torch_dtype


def simulated() -> _ways.ByMetal | None:
    """How kernels are computed inside `metalcore.simulate()`; None elsewhere."""
    for mode in _torch.dispatch_modes():
        if isinstance(mode, simulate):
            return _way(mode.checks)
    return None


TELLS_TEXT = mx.metal.is_available() or MLX >= (0, 32)
"""Whether MLX tells the text of a kernel here: before 0.32 it makes none without Metal."""


@cache
def _way(checks: Any) -> _ways.ByMetal:
    def compiled(*what: Any) -> Simulated:
        if not TELLS_TEXT:
            found = ".".join(map(str, MLX))
            refuse("metalcore.simulate", f"arrays need mlx 0.32 or later here, got {found}")
        return Simulated(_kernel.compiled(*what), checks)

    return _ways.ByMetal("sim", compiled)


class Simulated:
    """Stands for what `mx.fast.metal_kernel` makes: called as that is, it computes at once."""

    def __init__(self, kernel: Any, checks: Any) -> None:
        self._kernel, self._checks = kernel, checks

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[Any],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        init_value: float | None = None,
    ) -> list[mx.array]:
        how = {
            "output_shapes": output_shapes,
            "output_dtypes": output_dtypes,
            "grid": grid,
            "threadgroup": threadgroup,
        }
        text = generated(self._kernel, inputs, **how)
        outputs = [
            torch.empty(tuple(s), dtype=torch_dtype(d))
            for s, d in zip(output_shapes, output_dtypes, strict=True)
        ]
        if init_value is not None:
            for o in outputs:
                o.fill_(init_value)
        marks = [o if init_value is not None else mslsim.uninitialized(o) for o in outputs]
        # MLX has no group larger than the grid
        group = tuple(min(a, b) for a, b in zip(threadgroup, grid, strict=True))
        kernel = _compiled(text, self._checks)
        kernel(*map(to_torch, inputs), *marks, threads=tuple(grid), group_size=group)
        return [from_torch(_spoiled(o, m)) for o, m in zip(outputs, marks, strict=True)]


def _spoiled(x: torch.Tensor, mark: Any) -> torch.Tensor:
    """`x` with something wrong where nobody has written."""
    if mark is x:
        return x
    written = torch.from_numpy(np.asarray(mark.written, dtype=np.uint8).copy()).bool()
    rest = ~written.view(x.numel(), -1).all(-1)
    return x.masked_fill(rest, float("nan") if x.is_floating_point() else 113)


@cache
def _compiled(text: str, checks: Any) -> Any:
    name = re.findall(r"void (custom_kernel_\w+)\(", text)[-1]
    return getattr(mslsim.compile_shader(preamble() + text, checks), name)


@cache
def preamble() -> str:
    """What MLX puts before every kernel, as far as it concerns ours."""
    return (
        "#include <metal_stdlib>\nusing namespace metal;\n"
        "typedef half float16_t;\ntypedef bfloat bfloat16_t;\n"
    )


_texts: dict[Any, str] = {}


def generated(kernel: Any, inputs: Sequence[mx.array], **how: Any) -> str:
    """The Metal text that MLX makes for a call of `kernel`."""
    kinds = tuple((x.dtype, x.ndim == 0, min(x.size, _kernel.LEAST)) for x in inputs)
    key = (id(kernel), kinds, tuple(how["output_dtypes"]))
    if key not in _texts:
        shapes = [x.shape if x.size < 100 else (100,) for x in inputs]
        small = [mx.zeros(s, x.dtype) for s, x in zip(shapes, inputs, strict=True)]
        printed = _exported(lambda *a: kernel(inputs=a, verbose=True, stream=mx.gpu, **how), small)
        found = re.search(r"```\n(.*)```", printed, re.DOTALL)
        assert found is not None, printed
        _texts[key] = found[1]
    return _texts[key]


def _exported(function: Callable[..., Any], arrays: Sequence[mx.array]) -> str:
    """What is printed while `function` is exported, by C++ too."""
    libc = ctypes.CDLL(None)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as file:
        libc.fflush(None)
        before = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            mx.export_function(str(Path(folder) / "kernel.mlxfn"), function, *arrays)
        finally:
            libc.fflush(None)
            os.dup2(before, 1)
            os.close(before)
        file.seek(0)
        return file.read().decode()
