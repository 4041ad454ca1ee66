# SPDX-License-Identifier: MIT
"""Programs executed on torch tensors: by kernels of torch.mps, or by those of mslsim."""

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from metalcore import _trace
from metalcore._op import Op
from metalcore._policy import when_changed
from metalcore.metal import source
from metalcore.metal.plans import PLANS, Planned, flat
from metalcore.metal.program import (
    Buffer,
    Copy,
    Fill,
    Gather,
    Launch,
    Matmul,
    Number,
    Program,
    Sort,
    Step,
)

Slots = list[Any]
Action = Callable[[Any], Any]

# Programs that are kept for each way of running, the latest.
_KEPT = 4096

_runners: dict[Any, dict[Any, Action]] = {}


@when_changed
def forget() -> None:
    """Plan anew from now on: the policy has changed."""
    _runners.clear()


def execute(op: str, args: Sequence[Any], backend: "Backend") -> Any:
    """Plan and run `op`; NotImplemented where its plan declines."""
    planned = PLANS[op]
    runners = _runners.get((op, backend))
    if runners is None:
        runners = _runners[op, backend] = {}
    key = planned.key(args)
    runner = runners.get(key)
    if runner is None:
        runner = _bind(planned, args, backend)
        if len(runners) >= _KEPT:
            del runners[next(iter(runners))]
        runners[key] = runner
    return runner(args)


def _bind(planned: Planned, args: Sequence[Any], backend: "Backend") -> Action:
    program = planned.program(args, backend.gpu_cores)
    if program is None:
        return lambda args: NotImplemented
    return backend.runner(program, backend, next(_trace.tensors(args)).device)


def on_gpu(op: str, args: Sequence[Any]) -> Any:
    """Compute `op` on `mps` tensors: by its kernels, or by its meaning where it has none."""
    outputs = execute(op, args, METAL) if op in PLANS else NotImplemented
    return Op.all[op].run_reference(*args) if outputs is NotImplemented else outputs


@cache
def has_metal_kernels() -> bool:
    """Whether ops on `mps` tensors run Metal kernels here. On some virtual machines torch finds a
    GPU that has no memory to give: that is none."""
    if not torch.backends.mps.is_available():
        return False
    try:
        torch.empty(1, dtype=torch.uint8, device="mps")
    except RuntimeError:
        return False
    return True


class Runner:
    """A Program bound to kernels. All values of a run stand in one list of slots: arguments, what
    the program makes, constants and views; what a step takes is a fixed set of places in it."""

    def __init__(self, program: Program, backend: "Backend", device: torch.device) -> None:
        self._arguments, self._has_lists = program.arguments, program.has_lists
        self._rest: Slots = [None] * (program.slots - program.arguments)
        self._compiler = backend.compiler
        # `empty_like` takes two thirds of the time of `empty`, also where it expands
        self._made = [
            (b.slot, torch.empty((), dtype=b.dtype, device=device).expand(b.shape))
            for b in program.made
        ]
        self._derived = [
            (d.number.slot, d.function, [self._places(of) for of in d.of]) for d in program.derived
        ]
        self._views: list[tuple[int, Buffer]] = []
        self._known: dict[Any, int] = {}
        self._steps = [self._bound(step) for step in program.steps]
        self._checks = [(c.function, [self._place(b) for b in c.of]) for c in program.checks]
        self._outputs = self._places(program.outputs)
        self.kernels = program.kernels
        self.path = f"{backend.name}:{self.kernels}"

    def __call__(self, args: Sequence[Any]) -> Any:
        slots = self._filled(args)
        for step in self._steps:
            step(slots)
        for check, places in self._checks:
            check(*(slots[i] for i in places))
        _trace.note(self.path, self.kernels)
        return _picked(slots, self._outputs)

    def _filled(self, args: Sequence[Any]) -> Slots:
        slots: Slots = [*(flat(args) if self._has_lists else args), *self._rest]
        for slot, like in self._made:
            slots[slot] = torch.empty_like(like, memory_format=torch.contiguous_format)
        for slot, view in self._views:
            base = slots[view.slot]
            offset = base.storage_offset() + view.offset
            slots[slot] = base.as_strided(view.shape, view.stride, offset)
        for slot, function, of in self._derived:
            slots[slot] = function(*(_picked(slots, places) for places in of))
        return slots

    def _places(self, values: Any) -> Any:
        """The places of one value or of several; None for nothing."""
        if isinstance(values, (tuple, list)):
            return [self._place(v) for v in values]
        return None if values is None else self._place(values)

    def _place(self, value: Any, is_pointer: bool = False) -> int:
        """The slot of a value. Constants and views get theirs here."""
        if isinstance(value, Number):
            return value.slot
        if not isinstance(value, Buffer):
            return self._slot((type(value), value), value)
        # a kernel takes where memory starts, whatever its shape
        if value.is_base or (is_pointer and value.offset == 0):
            return value.slot
        what = (value.slot, value.shape, value.stride, value.offset)
        is_new = what not in self._known
        slot = self._slot(what, None)
        if is_new:
            self._views.append((slot, value))
        return slot

    def _slot(self, what: Any, value: Any) -> int:
        if what not in self._known:
            self._known[what] = self._arguments + len(self._rest)
            self._rest.append(value)
        return self._known[what]

    def _bound(self, step: Step) -> Action:
        place = self._place
        match step:
            case Launch():
                return self._launch(step)
            case Copy(to, of):
                a, b = place(to), place(of)
                return lambda s: s[a].copy_(s[b])
            case Fill(to, value):
                a, b = place(to), place(value)
                return lambda s: s[a].fill_(s[b])
            case Matmul(to, x, y, alpha, beta, add):
                a, b, c, d = place(to), place(x), place(y), place(add)
                if beta == 0 and alpha == 1:
                    return lambda s: torch.bmm(s[b], s[c], out=s[a])
                how = {"alpha": alpha, "beta": beta}
                return lambda s: torch.baddbmm(s[d], s[b], s[c], **how, out=s[a])
            case Gather(to, of, dim, index):
                a, b, c = place(to), place(of), place(index)
                return lambda s: torch.gather(s[b], dim, s[c], out=s[a])
            case Sort(values, order, of):
                a, b, c = place(values), place(order), place(of)
                return lambda s: torch.sort(s[c], stable=True, out=(s[a], s[b]))

    def _launch(self, step: Launch) -> Action:
        kernel = source.kernel(step.file, step.function, step.variant, self._compiler)
        threads, group = step.threads, step.group
        _refuse_too_many_threads(kernel, step)
        pick = itemgetter(*(self._place(a, is_pointer=True) for a in step.args))
        return lambda s: kernel(*pick(s), threads=threads, group_size=group)


def _refuse_too_many_threads(kernel: Any, step: Launch) -> None:
    """What a GPU has registers for may be less than the kernel declares; torch's kernels tell it,
    others do not. Elsewhere than in torch a larger group is dropped without a word."""
    limit = getattr(kernel, "max_threads_per_threadgroup", None)
    if limit is not None and prod(step.group) > limit:
        raise RuntimeError(
            f"{step.kernel}: the launch needs groups of {prod(step.group)} threads, and this GPU "
            f"has registers for {limit} of them; give metalcore a policy with fewer `threads`, "
            "and please report it"
        )


def _picked(slots: Slots, places: Any) -> Any:
    if isinstance(places, list):
        return tuple(slots[i] for i in places)
    return None if places is None else slots[places]


class Backend(NamedTuple):
    """What executes programs: its name in traces, what compiles kernels (torch.mps where there is
    none), and the runner to use."""

    name: str
    compiler: source.Compiler | None = None
    runner: type[Runner] = Runner

    @property
    def gpu_cores(self) -> int | None:
        """Those of this machine's GPU; None where kernels run elsewhere, and where an older torch
        does not tell."""
        tell = getattr(torch.backends.mps, "get_core_count", None)
        is_here = self.compiler is None and torch.backends.mps.is_available()
        return tell() if tell is not None and is_here else None


METAL = Backend("metal")
