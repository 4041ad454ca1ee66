# SPDX-License-Identifier: MIT
"""Fit: whether a kernel fits an Apple GPU, from its own LLVM IR.

The registers of a thread decide how large a threadgroup can be: an M1 or M2 does not start a larger
one. Apple's compiler is not at hand, so they are estimated: from the most that is in use at once,
with constants that were fitted to what it reported for kernels of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import agx
from .build import Builder
from .codesize import code_of, largest_loop
from .compiler import PACKAGE
from .frontend.rewrite import symbol
from .pressure import Liveness, is_long_division, peaks
from .registers import Array, arrays_in_memory
from .shared import Shared
from .sites import Locations
from .ssa import Function, read
from .text.kernels import Kernel
from .values import Values

# Half registers of a thread, and the largest threadgroup of threads with so many, on M1 and M2.
GROUPS = {
    104: 1024, 112: 896, 128: 832, 136: 768, 144: 704,
    160: 640, 184: 576, 208: 512, 232: 448, 256: 384,
}  # fmt: skip
HALF_REGISTERS = 256
# What the compiler may do better or worse than the estimate.
MARGIN = 1.33

# Fitted to 42 kernels: beyond so many registers, more of them are lost to gaps ...
_TIGHT, _GAPS = 90, 0.4
# ... and loads are moved up by this share of what there is to gain, while few are in use.
_EARLY, _FEW = 0.6, 150

Place = tuple[str, int]
_MAKERS = ["fit", "shared", "values", "pressure", "codesize", "ssa", "registers", "sites", "agx"]


@dataclass(frozen=True, slots=True)
class Fit:
    """What one kernel takes of an M1 or M2.

    Args:
        half_registers: registers of 16 bits in use at once, as many as the kernel wants.
        code_bytes: machine code, and `loop_bytes` that of its largest loop, at `loop`.
        divisions: lines with a 64-bit division by a number that is no constant.
        arrays: those of a thread that are in memory.
        spills: half registers that are kept in memory.
        source: what tells it: "estimate", or the compiler that $MSLSIM_AGX names.
    """

    half_registers: int
    code_bytes: int
    loop_bytes: int
    loop: Place
    divisions: tuple[Place, ...]
    arrays: tuple[Array, ...]
    spills: int
    source: str = "estimate"

    @property
    def largest_group(self) -> int:
        """Threads of the largest threadgroup that starts."""
        return largest_group(self.half_registers)

    def fits(self, group: int, margin: float = MARGIN) -> bool:
        """Whether a threadgroup of so many threads starts, were there `margin` times the registers
        in use."""
        return group <= largest_group(self.half_registers * margin)


def largest_group(half_registers: float) -> int:
    return next((t for most, t in GROUPS.items() if half_registers <= most), min(GROUPS.values()))


def fits_of(builder: Builder, kernels: Collection[str] | None = None) -> dict[str, Fit]:
    """The Fit of each kernel of a source, or of those named."""
    names = sorted(builder.index.kernels if kernels is None else kernels)
    exact = agx.compiler()

    def make() -> dict[str, dict[str, object]]:
        chosen = [k for k in builder.parsed().kernels if k.name in names]
        lines = builder.gpu_intermediate(chosen).splitlines()
        locations = Locations(lines, builder.parsed().files, builder.own_headers)
        by_symbol = {f"msl_thread_{symbol(k.name)}": k for k in chosen}
        arrays = arrays_in_memory(lines, builder.parsed().files)
        found = {}
        for function in read(lines, "msl_thread_"):
            if kernel := by_symbol.get(function.name):
                fit = _fit(kernel, function, locations, arrays[function.name])
                found[kernel.name] = asdict(_measured(builder, kernel, fit, exact))
        return found

    made = [*(PACKAGE / f"{name}.py" for name in _MAKERS), PACKAGE / "machine" / "agx.h"]
    by = (str(exact), exact.stat().st_mtime) if exact else ()
    key = repr((builder.tools.recipe(False, "gpu"), [m.read_text() for m in made], names, by))
    return {name: _read(data) for name, data in builder.kept("fit", key, make).items()}


def _read(data: dict[str, Any]) -> Fit:
    """A Fit out of what JSON made of it."""
    data["loop"] = tuple(data["loop"])
    data["divisions"] = tuple(map(tuple, data["divisions"]))
    data["arrays"] = tuple(Array(*array) for array in data["arrays"])
    return Fit(**data)


def _fit(
    kernel: Kernel, function: Function, locations: Locations, arrays: tuple[Array, ...]
) -> Fit:
    values = Values(function, Shared(kernel, function))
    live = Liveness(values)
    few, early = peaks(live)
    wanted = few + _GAPS * max(0, few - _TIGHT)
    wanted = max(wanted, min(wanted + _EARLY * (early - few), _FEW))
    code = code_of(values, live)
    loop_bytes, loop = largest_loop(function, code)
    divisions = [
        locations.place(step.instruction.debug)
        for steps in live.steps.values()
        for step in steps
        if is_long_division(step.instruction) and not values.is_shared(step.instruction.name)
    ]
    registers = round(wanted)
    return Fit(
        registers,
        sum(code.values()),
        loop_bytes,
        locations.place(loop),
        tuple(dict.fromkeys(divisions)),
        arrays,
        max(0, registers - HALF_REGISTERS),
    )


def _measured(builder: Builder, kernel: Kernel, fit: Fit, exact: Path | None) -> Fit:
    """The Fit with the figures of Mesa's compiler, where it is at hand and takes the kernel."""
    if exact is None:
        return fit
    machine, cpp = builder.cpp_of(kernel)
    try:
        found = agx.figures(exact, kernel, cpp, machine)
    except agx.AgxFailed as failure:
        return replace(fit, source=f"estimate, because of {failure}")
    return replace(fit, source=exact.name, **found._asdict())


def table(fits: dict[str, Fit]) -> Iterator[str]:
    """Lines that show a Fit for each kernel."""
    yield f"{'kernel':<48} {'registers':>9} {'group':>6} {'code':>8} {'loop':>8}  notes"
    for name, fit in sorted(fits.items()):
        notes = [f"{len(fit.divisions)} 64-bit divisions"] if fit.divisions else []
        notes += [f"{fit.spills} spilled"] if fit.spills else []
        notes += [fit.source] if fit.source != "estimate" else []
        yield (
            f"{name:<48} {fit.half_registers:>9} {fit.largest_group:>6} {fit.code_bytes:>8} "
            f"{fit.loop_bytes:>8}  {', '.join(notes)}".rstrip()
        )
