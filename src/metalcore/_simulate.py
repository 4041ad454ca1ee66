# SPDX-License-Identifier: MIT
"""simulate(): Metal kernels on the CPU, checked."""

from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from metalcore import _torch
from metalcore._optional import need
from metalcore._trace import WatchingMode, are_composed, tensors, trace
from metalcore.metal import source
from metalcore.metal.plans import PLANS
from metalcore.metal.program import Launch, Sort, Step
from metalcore.metal.run import Action, Backend, Runner, Slots, execute


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
        self, checks: str | frozenset[str] = "all", *, compiler: source.Compiler | None = None
    ) -> None:
        super().__init__()
        self.checks = checks
        self._backend = Backend("sim", compiler) if compiler else _backend(checks)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if are_composed(types):
            return NotImplemented
        if func.namespace == "metalcore":
            with self:
                return func.decompose(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if func.namespace != "metalcore_kernels" or name not in PLANS or not _on_cpu(args):
            return func(*args, **(kwargs or {}))

        def call() -> Any:
            outputs = execute(name, args, self._backend)
            return func(*args) if outputs is NotImplemented else outputs

        # A trace that was entered first does not see what ends here.
        for mode in _torch.dispatch_modes():
            if isinstance(mode, trace):
                return mode.measure(func, args, call)
        return call()


@cache
def _mslsim() -> Any:
    return need("mslsim", "simulate")


@cache
def _backend(checks: str | frozenset[str]) -> Backend:
    _mslsim()
    runner = Runner if checks == "none" else CheckedRunner
    return Backend("sim", lambda text: _mslsim().compile_shader(text, checks), runner)


class CheckedRunner(Runner):
    """Runs a program so that reads of what nobody wrote are found, in any of its launches.

    What the program makes counts as unwritten until a step writes it. What a kernel is given to
    write counts as unwritten in each launch, so that it is found out if it reads that; where the
    same is given to be read, as in an update in place, a copy is written. MLX has two arrays there.
    """

    def _filled(self, args: Sequence[Any]) -> Slots:
        slots = super()._filled(args)
        made = (slots[slot] for slot, _ in self._made)
        memory = {_storage(x): _mslsim().uninitialized(x) for x in made if x.numel()}
        return [*slots, memory]

    def _bound(self, step: Step) -> Action:
        action = super()._bound(step)
        if isinstance(step, Launch):
            return action
        written = [
            self._place(b)
            for b in ((step.values, step.order) if isinstance(step, Sort) else (step.to,))
        ]

        def act(slots: Slots) -> None:
            action(slots)
            for place in written:
                mark = slots[-1].get(_storage(slots[place]))
                if mark is not None:
                    mark.view(slots[place]).note_written()

        return act

    def _launch(self, step: Launch) -> Action:
        kernel = source.kernel(step.file, step.function, step.variant, self._compiler)
        pick = itemgetter(*(self._place(a, is_pointer=True) for a in step.args))
        parameters = step.signature.parameters
        written = [i for i, p in enumerate(parameters) if p.is_written and "atomic" not in p.type]

        def launch(slots: Slots) -> None:
            values, outputs = _apart(list(pick(slots)), written, slots[-1])
            kernel(*values, threads=step.threads, group_size=step.group)
            for output in outputs.values():
                output.keep(slots[-1])

        return launch


class _Output:
    """Memory that one launch writes: the original, or a copy of it where that is read too."""

    def __init__(self, x: Tensor, is_read: bool) -> None:
        self._original = x.untyped_storage()
        self._storage = self._original.clone() if is_read else self._original
        self._mark = _mslsim().uninitialized(
            self._view(x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0))
        )

    def _view(self, x: Tensor) -> Tensor:
        empty = torch.empty(0, dtype=x.dtype)
        return empty.set_(self._storage, x.storage_offset(), x.shape, x.stride())

    def argument(self, x: Tensor) -> Any:
        return self._mark.view(self._view(x))

    def keep(self, memory: dict[int, Any]) -> None:
        """What was written counts from now on."""
        if self._storage is not self._original:
            self._original.copy_(self._storage)
        known = memory.get(self._original.data_ptr())
        if known is not None:
            known.written |= self._mark.written


def _apart(
    args: list[Any], written: Sequence[int], memory: dict[int, Any]
) -> tuple[list[Any], dict[int, _Output]]:
    """The arguments of a launch with marks, and what it writes by storage."""
    given = {i: _storage(a) for i, a in enumerate(args) if isinstance(a, Tensor)}
    read = {place for i, place in given.items() if i not in written}
    outputs: dict[int, _Output] = {}
    for i, place in given.items():
        if i in written:
            output = outputs.setdefault(place, _Output(args[i], place in read))
            args[i] = output.argument(args[i])
        elif place in memory:
            args[i] = memory[place].view(args[i])
    return args, outputs


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _on_cpu(args: tuple[Any, ...]) -> bool:
    return all(a.device.type == "cpu" for a in tensors(args))
