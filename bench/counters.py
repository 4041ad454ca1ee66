# SPDX-License-Identifier: MIT
"""`metalcore bench --sim`: what the Metal kernels move, counted by the simulator.

Counts, not times: device bytes moved against those the op must move, memory lines per access of a
simdgroup, barriers. Bytes that another threadgroup read before count as cached.
"""

import json as json_format
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

import metalcore
from metalcore.metal.program import MSL_TYPE

from .harness import Bench, Built, Case, cases

# Larger cases show nothing that smaller ones do not, and take minutes.
_MAX_ELEMENTS = 1 << 22


@dataclass
class Counted:
    """The Metal kernels of one case. `moved` and `needed` are device bytes."""

    op: str
    shape: str
    dtype: str
    kernels: str
    needed: int
    moved: int
    ratio: float
    lines_per_access: float
    barriers_per_thread: float
    findings: int


class _Recording:
    """A library of mslsim whose kernels leave their reports behind."""

    def __init__(self, source: str, reports: list[Any]) -> None:
        import mslsim

        self._library = mslsim.compile_shader(source, on_finding="collect")
        self._reports = reports

    def __getattr__(self, kernel: str) -> Any:
        def call(*args: Any, **options: Any) -> None:
            self._reports.append(getattr(self._library, kernel)(*args, **options))

        return call


def count(case: Case) -> Counted:
    """Run one case in the simulator, with gradients where the benchmark has them."""
    bench = case.bench
    torch.manual_seed(0)
    inputs = list(bench.inputs(**case.point, dtype=case.dtype))
    reports: list[Any] = []
    with metalcore.simulate(compiler=lambda source: _Recording(source, reports)):
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
        findings=sum(len(report.findings) for report in reports),
    )


def run(benches: Sequence[Bench], json: Path | None = None) -> int:
    """Count all cases that are small enough; 1 if the simulator found something wrong."""
    small = [
        c
        for c in cases([b for b in benches if b.bytes_moved])
        if c.dtype in MSL_TYPE and torch.Size(c.point.values()).numel() <= _MAX_ELEMENTS
    ]
    rows = [
        count(case)
        for case in track(small, "simulating", console=Console(stderr=True), transient=True)
    ]
    table = Table(
        *(
            "op",
            "shape",
            "dtype",
            "moved/needed",
            "lines/access",
            "barriers",
            "findings",
            "kernels",
        ),
        box=SIMPLE_HEAD,
    )
    for r in rows:
        table.add_row(
            *(r.op, r.shape, r.dtype, f"{r.ratio:.3f}", f"{r.lines_per_access:.2f}"),
            *(f"{r.barriers_per_thread:g}", str(r.findings), r.kernels),
        )
    console = Console()
    console.print(table)
    console.print(
        "Device bytes moved over those needed, 128-byte lines per access of a simdgroup, barriers "
        "per thread: counted by mslsim on the CPU, not measured on a GPU."
    )
    if json is not None:
        json.write_text(json_format.dumps([asdict(r) for r in rows], indent=1) + "\n")
    return int(any(r.findings for r in rows))
