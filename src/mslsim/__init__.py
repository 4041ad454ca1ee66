# SPDX-License-Identifier: MIT
"""mslsim: runs Metal compute kernels on the CPU and finds what is wrong with them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compiler import CompilerMissing
    from .fit import Fit
    from .library import Kernel, Library, compile_shader, run
    from .memory import uninitialized
    from .profiling import Profile, profile
    from .render import render
    from .report import CompileError, Finding, KernelError, LaunchError, Report
    from .steps import Step
    from .texture import Sampler
    from .tracing import trace
    from .unrun import fits, lint

__all__ = [
    "CompileError",
    "CompilerMissing",
    "Finding",
    "Fit",
    "Kernel",
    "KernelError",
    "LaunchError",
    "Library",
    "Profile",
    "Report",
    "Sampler",
    "Step",
    "compile_shader",
    "fits",
    "lint",
    "profile",
    "render",
    "run",
    "trace",
    "uninitialized",
]

# Where each name is. Modules load on first use: `mslsim.signature` needs none of them.
_HOME = {
    "uninitialized": "memory",
    "CompilerMissing": "compiler",
    "Fit": "fit",
    "Sampler": "texture",
    "Step": "steps",
    "render": "render",
    "trace": "tracing",
    **dict.fromkeys(("Kernel", "Library", "compile_shader", "run"), "library"),
    **dict.fromkeys(("Profile", "profile"), "profiling"),
    **dict.fromkeys(("fits", "lint"), "unrun"),
    **dict.fromkeys(("CompileError", "Finding", "KernelError", "LaunchError", "Report"), "report"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mslsim' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "signature"]
