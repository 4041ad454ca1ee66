# SPDX-License-Identifier: MIT
"""simulate(): Metal kernels on the CPU, checked."""

from functools import cache
from typing import Any

from metalcore import _torch
from metalcore._trace import WatchingMode, tensors, trace
from metalcore.metal.launch import PLANS, execute
from metalcore.metal.source import Compiler


class simulate(WatchingMode):  # noqa: N801  (reads as a function at the call)
    """Compute metalcore ops on CPU tensors with their Metal kernels, executed by mslsim.

    The very code that runs on a Mac (plan, source, arguments, kernels) runs here, and whatever
    mslsim finds (a race, an access out of bounds, ...) is raised as `mslsim.KernelError`.

    Args:
        checks: what mslsim checks: "all", "none" for speed, or a set of names.
        compiler: takes the place of `mslsim.compile_shader`.

    Example:
        >>> with metalcore.simulate():
        ...     y = metalcore.rms_norm(x, weight)
    """

    def __init__(
        self, checks: str | frozenset[str] = "all", *, compiler: Compiler | None = None
    ) -> None:
        super().__init__()
        self._compiler = compiler or _compiler(checks)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "metalcore":
            with self:
                return func.decompose(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if func.namespace != "metalcore_kernels" or name not in PLANS or not _on_cpu(args):
            return func(*args, **(kwargs or {}))

        def call() -> Any:
            outputs = execute(name, args, "sim", self._compiler)
            return func(*args) if outputs is NotImplemented else outputs

        # A trace that was entered first does not see what ends here.
        for mode in _torch.dispatch_modes():
            if isinstance(mode, trace):
                return mode.measure(func, args, call)
        return call()


@cache
def _compiler(checks: str | frozenset[str]) -> Compiler:
    import mslsim

    return lambda source: mslsim.compile_shader(source, checks)


def _on_cpu(args: tuple[Any, ...]) -> bool:
    return all(a.device.type == "cpu" for a in tensors(args))
