# SPDX-License-Identifier: MIT
"""Loads the compiled CPU kernels: one library per instruction set, chosen here, once.

Whole libraries rather than functions are built per instruction set, so that no inline function
compiled for a newer CPU can be linked into the code of an older one.
"""

import ctypes
import os
import platform
import sys
import warnings
from pathlib import Path

import torch

# Best first. Each name is a library `_cpu_<name>.so` of the package.
_SETS = {"x86_64": ("avx512", "avx2", "baseline"), "aarch64": ("neon",)}
_TORCH_NAME = {"AVX512": "avx512", "AVX2": "avx2"}

# What `metalcore_interface` of a library must be that goes with these sources.
_INTERFACE = 3

isa: str | None = None
"""The instruction set in use; None where no compiled kernels are loaded."""

problem: str | None = None
"""Why there are no compiled kernels, in words."""

_library: ctypes.CDLL | None = None


def usable_sets() -> tuple[str, ...]:
    """Instruction sets this CPU can run, best first."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(
        platform.machine().lower(), platform.machine().lower()
    )
    names = _SETS.get(machine, ())
    if machine == "x86_64":
        best = _TORCH_NAME.get(torch.backends.cpu.get_cpu_capability(), "baseline")
        names = names[names.index(best) :]
    return names


def built_sets() -> tuple[str, ...]:
    """Instruction sets there is a library for."""
    return tuple(sorted(_libraries()))


def load() -> None:
    """Load the best library there is, or the one METALCORE_CPU names (`none` for no library)."""
    global isa, problem, _library
    wanted = os.environ.get("METALCORE_CPU")
    if wanted == "none":
        problem = "METALCORE_CPU=none"
        return
    candidates = [s for s in usable_sets() if s in built_sets()]
    if wanted is not None:
        if wanted not in candidates:
            raise ImportError(
                f"metalcore: METALCORE_CPU must be one of {', '.join([*candidates, 'none'])} "
                f"on this machine, got {wanted}"
            )
        candidates = [wanted]
    if not candidates:
        problem = "not built for this machine; build it with `pip install .` (needs a C++ compiler)"
        return
    path = _libraries()[candidates[0]]
    try:
        torch.ops.load_library(path)
        library = ctypes.CDLL(str(path))
        if library.metalcore_interface() != _INTERFACE:
            raise OSError("it is of another version of metalcore")
    except (AttributeError, OSError) as error:
        problem = f"{path.name} does not load: {error}; build it again with `pip install .`"
        consequence = "ops run as the reference, slowly; `metalcore doctor` tells more"
        warnings.warn(f"metalcore: {problem}; {consequence}", stacklevel=2)
        return
    _library = library
    _library.metalcore_last_variant.restype = ctypes.c_char_p
    _library.metalcore_any.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    _library.metalcore_build_info.restype = ctypes.c_char_p
    _library.metalcore_knobs.restype = ctypes.c_char_p
    isa = candidates[0]


def last_variant() -> str:
    """The variant the last CPU kernel on this thread chose."""
    return "" if _library is None else str(_library.metalcore_last_variant().decode())


def knobs() -> dict[str, dict[str, int]]:
    """The tuned numbers of CPU kernels, by op and name."""
    found: dict[str, dict[str, int]] = {}
    if _library is not None:
        for line in _library.metalcore_knobs().decode().splitlines():
            op, name, value = line.split()
            found.setdefault(op, {})[name] = int(value)
    return found


def set_knob(op: str, name: str, value: int) -> None:
    """Set a tuned number of a CPU kernel."""
    if _library is not None:
        _library.metalcore_set_knob(op.encode(), name.encode(), ctypes.c_int64(value))


def any_nonzero(info: torch.Tensor) -> bool:
    """Whether a contiguous int32 tensor holds anything but zeros: `info.any()` in a quarter of its
    time."""
    if _library is None or not info.is_cpu:
        return bool(info.any())
    return bool(_library.metalcore_any(info.data_ptr(), info.numel()))


def build_info() -> str:
    """Compiler and target of the loaded library."""
    return "" if _library is None else str(_library.metalcore_build_info().decode())


def in_huge_pages(x: torch.Tensor) -> torch.Tensor:
    """`x`, which nobody wrote to yet; the system is asked for huge pages if it is large."""
    if _library is not None and type(x) is torch.Tensor and x.device.type == "cpu":
        start, size = ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.nbytes)
        _library.metalcore_prefer_huge_pages(start, size)
    return x


def zeros_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`torch.zeros_like`, on a CPU in huge pages: 1.04x for a step over 10M values."""
    return in_huge_pages(torch.empty_like(x, dtype=dtype)).zero_()


def _libraries() -> dict[str, Path]:
    # An editable install has the sources in one folder of the package and the libraries in another.
    own = os.environ.get("METALCORE_LIBRARIES")
    folders = [own] if own else sys.modules[__name__.partition(".")[0]].__path__
    files = [file for folder in folders for file in Path(folder).glob("_cpu_*.so")]
    return {file.stem.removeprefix("_cpu_"): file for file in files}
