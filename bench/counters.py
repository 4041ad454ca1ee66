# SPDX-License-Identifier: MIT
"""`metalcore bench --sim`: what the Metal kernels would cost an Apple GPU, by the simulator.

Counts, and times by its model: device bytes moved against those the op must move, memory lines per
access of a simdgroup, issue slots, barriers. Bytes that another threadgroup read before count as
cached.
"""

import json as json_format
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

import metalcore
from metalcore._report import number
from metalcore.metal.program import MSL_TYPE

from .harness import Bench, Built, Case, cases

# Larger cases show nothing that smaller ones do not, and take minutes.
_MAX_ELEMENTS = 1 << 22
# Share of all launches below which one that waits does not matter.
_SMALL = 0.1


@dataclass(frozen=True)
class Time:
    """Launches one after the other on a chip, in milliseconds; `total` is None where the model has
    no estimate for one of them. `issue_share` is their issue time over that of the memory."""

    chip: str
    total: float | None
    limiter: str
    issue_share: float
    confidence: str


@dataclass
class Counted:
    """The Metal kernels of one case. `moved` and `needed` are device bytes, slots those of a
    simdgroup for each value of the shape."""

    op: str
    shape: str
    dtype: str
    kernels: str
    needed: int
    moved: int
    ratio: float
    lines_per_access: float
    barriers_per_thread: float
    slots_per_value: float
    times: list[Time]
    findings: int


class _Recording:
    """A library of mslsim whose kernels leave what `look` finds behind."""

    def __init__(self, source: str, look: Callable[..., None]) -> None:
        import mslsim

        self._source, self._look = source, look
        self._library = mslsim.compile_shader(source, on_finding="collect")

    def __getattr__(self, kernel: str) -> Any:
        def call(*args: Any, **options: Any) -> None:
            self._look(self._source, self._library[kernel], args, options)

        return call


@contextmanager
def recorded(checked: bool) -> Iterator[tuple[list[Any], list[Any]]]:
    """Reports and profiles of all kernels that run inside it; no reports where not `checked`."""
    import mslsim

    reports: list[Any] = []
    profiles: list[Any] = []

    def look(source: str, kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> None:
        launch = {"group_size": options["group_size"], "arg_casts": options.get("arg_casts")}
        profiles.append(
            mslsim.profile(source, kernel.name, args, options["threads"], restore=checked, **launch)
        )
        if checked:
            reports.append(kernel(*args, **options))

    with metalcore.simulate(compiler=lambda source: _Recording(source, look)):
        yield reports, profiles


def time_of(profiles: Sequence[Any], chip: str) -> Time:
    """The time of launches that follow each other. A small one that waits, such as the sum of a few
    partial results, is taken for as long as its bytes and slots."""
    found = [profile.estimate(chip) for profile in profiles]
    lengths = [max(e.memory, e.issue, e.complex, e.starts) for e in found]
    known = [
        length if e.total is None and length < _SMALL * sum(lengths) else e.total
        for e, length in zip(found, lengths, strict=True)
    ]
    longest = found[lengths.index(max(lengths))]
    return Time(
        chip,
        None if None in known else sum(t for t in known if t is not None),
        longest.limiter,
        sum(max(e.issue, e.complex) for e in found) / max(1e-12, sum(e.memory for e in found)),
        longest.confidence,
    )


def slots_of(profiles: Sequence[Any]) -> float:
    """Issue slots of all simdgroups, times their lanes."""
    return float(sum(profile.slots * profile.threads for profile in profiles))


def count(case: Case) -> Counted:
    """Run one case in the simulator, with gradients where the benchmark has them."""
    from mslsim.model import USUAL

    bench = case.bench
    torch.manual_seed(0)
    inputs = list(bench.inputs(**case.point, dtype=case.dtype))
    with recorded(checked=True) as (reports, profiles):
        for x in inputs:
            x.requires_grad_(bench.backward and x.is_floating_point())
        run = bench.run.build(*inputs) if isinstance(bench.run, Built) else bench.run
        outputs = run(*inputs)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        if bench.backward:
            torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])
    assert bench.bytes_moved is not None
    needed = bench.bytes_moved(*inputs)
    devices = [report.counters["device"] for report in reports]
    moved = sum(d["fetched"] + d["written"] for d in devices)
    return Counted(
        op=bench.title,
        shape=case.shape,
        dtype=str(case.dtype).removeprefix("torch."),
        kernels=", ".join(report.kernel for report in reports),
        needed=needed,
        moved=moved,
        ratio=moved / needed,
        lines_per_access=max(r.counters["lines_per_simdgroup_access"] for r in reports),
        barriers_per_thread=sum(r.counters["barriers_per_thread"] for r in reports),
        slots_per_value=slots_of(profiles) / torch.Size(case.point.values()).numel(),
        times=[time_of(profiles, chip) for chip in USUAL],
        findings=sum(len(report.findings) for report in reports),
    )


def time_text(time: Time) -> str:
    """`0.52 (issue 31%)`: milliseconds, or -, and what decides."""
    total = "-" if time.total is None else number(time.total)
    why = f"issue {time.issue_share:.0%}" if time.limiter == "memory" else time.limiter
    return f"{total} ({why})"


def run(benches: Sequence[Bench], json: Path | None = None) -> int:
    """Count all cases that are small enough; 1 if the simulator found something wrong."""
    from mslsim.model import USUAL

    small = [
        c
        for c in cases([b for b in benches if b.bytes_moved])
        if c.dtype in MSL_TYPE and torch.Size(c.point.values()).numel() <= _MAX_ELEMENTS
    ]
    rows = [
        count(case)
        for case in track(small, "simulating", console=Console(stderr=True), transient=True)
    ]
    head = ("op", "shape", "dtype", "moved/needed", "lines/access", "barriers", "slots/value")
    table = Table(*head, *(f"{chip} ms" for chip in USUAL), "findings", box=SIMPLE_HEAD)
    for r in rows:
        table.add_row(
            *(r.op, r.shape, r.dtype, f"{r.ratio:.3f}", f"{r.lines_per_access:.2f}"),
            *(f"{r.barriers_per_thread:g}", number(r.slots_per_value)),
            *(time_text(time) for time in r.times),
            str(r.findings),
        )
    console = Console() if Console().is_terminal else Console(width=160)
    console.print(table)
    console.print(
        "Device bytes moved over those needed, 128-byte lines per access of a simdgroup, barriers "
        "per thread, issue slots for each value, and the time that a model estimates, with what "
        "decides it: memory, with the time to issue as a share of it, or another limit. Counted "
        "by mslsim on the CPU, not measured on a GPU."
    )
    if json is not None:
        json.write_text(json_format.dumps([asdict(r) for r in rows], indent=1) + "\n")
    return int(any(r.findings for r in rows))
