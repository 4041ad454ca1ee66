# SPDX-License-Identifier: MIT
"""`metalcore bench`: finds the benchmarks, runs them, and reports as table, JSON and HTML."""

import importlib
import json as json_format
import math
import pkgutil
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from metalcore import _native
from metalcore._report import Bars, Lines, Section, number, page
from metalcore._report import Table as HtmlTable

from . import __path__ as _folders
from . import tables
from .compiled import against_compiler
from .harness import Bench, Row, cases, run_case
from .limits import WORKING_SETS, Limits, measure


@dataclass(frozen=True)
class Machine:
    """What the figures belong to."""

    processor: str
    system: str
    device: str
    threads: int
    torch: str
    kernels: str
    date: str

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return (
            f"{self.processor}, {self.system}; {self.device}, {threads}; torch {self.torch}; "
            f"metalcore CPU kernels: {self.kernels}; {self.date}"
        )


def available() -> dict[str, tuple[Bench, ...]]:
    """The benchmarks by `<family>/<op>`: every module `<family>.<op>` of this package, but those
    that begin with an underscore, which others share."""
    found = {}
    for family in pkgutil.iter_modules(_folders):
        if family.ispkg:
            package = importlib.import_module(f"{__package__}.{family.name}")
            for op in pkgutil.iter_modules(package.__path__):
                if op.name.startswith("_"):
                    continue
                module = importlib.import_module(f"{package.__name__}.{op.name}")
                found[f"{family.name}/{op.name}"] = tuple(module.BENCHES)
    return found


def select(selection: Sequence[str]) -> list[Bench]:
    """Benchmarks by `<family>/<op>`, or all of a `<family>`; all for an empty selection."""
    found = available()
    unknown = [
        s for s in selection if not any(s in (name, name.partition("/")[0]) for name in found)
    ]
    if unknown:
        raise ValueError(
            f"bench: takes <family>/<op> or <family>, got {', '.join(unknown)}; "
            f"there are {', '.join(sorted(found))}"
        )
    return [
        bench
        for name, benches in sorted(found.items())
        if not selection or name in selection or name.partition("/")[0] in selection
        for bench in benches
    ]


def run(
    selection: Sequence[str] = (),
    json: Path | None = None,
    html: Path | None = None,
    threads: int | None = None,
    device: str | None = None,
    compile: bool = False,
    markdown: bool = False,
) -> int:
    """Run benchmarks and report.

    Args:
        selection: `<family>/<op>` or `<family>`; empty for all.
        json: file to write the rows to, with the machine and its limits.
        html: file to write a page with plots to.
        threads: CPU threads to use; default what torch uses.
        device: `cpu` or `mps`; default mps where there is one.
        compile: also compare with torch.compile, in the end; the compiler takes minutes.
        markdown: print the table of docs/overrides.md and nothing else; for `patch`.

    Returns:
        0; 1 if a metalcore result was wrong or failed; 2 if the selection names nothing; 130 if it
        was interrupted, after a report of what was measured before.
    """
    console = Console()
    try:
        benches = select(selection)
    except ValueError as problem:
        Console(stderr=True).print(str(problem), style="red", highlight=False)
        return 2
    if compile:
        benches += against_compiler(benches)
    if threads is not None:
        torch.set_num_threads(threads)
    device = device or ("mps" if torch.backends.mps.is_available() else "cpu")
    machine = _machine(device)
    limits, rows, interrupted = _measure(benches, device, console)
    if json is not None:
        content = {
            "machine": vars(machine),
            "limits": {
                "copy_gbps": {str(size): gbps for size, gbps in limits.copy_gbps.items()},
                "matmul_gflops": limits.matmul_gflops,
            },
            "rows": [row.as_dict() for row in rows],
        }
        json.write_text(json_format.dumps(content, indent=1) + "\n")
    titles = dict.fromkeys(row.op for row in rows)
    grids = [_grid(title, [row for row in rows if row.op == title]) for title in titles]
    if html is not None:
        html.write_text(_html(machine, limits, rows, grids, benches), encoding="utf-8")
    if markdown:
        patched = [row for row in rows if row.op.startswith("patch/")]
        sys.stdout.write(f"{tables.overrides(patched)}\n{machine}\n")
    else:
        _print(machine, limits, grids, console)
    for file in (json, html):
        if file is not None:
            console.print(f"wrote {file}", highlight=False)
    if interrupted:
        Console(stderr=True).print("interrupted: the report is not complete", style="red")
        return 130
    return 1 if any(isinstance(row.ms, str) for row in rows) else 0


def _measure(
    benches: Sequence[Bench], device: str, console: Console
) -> tuple[Limits, list[Row], bool]:
    """The limits, the rows, and whether an interrupt ended it early."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        todo = cases(benches)
        task = progress.add_task("limits", total=len(WORKING_SETS) + 1 + len(todo))
        limits = measure(device, lambda: progress.advance(task))
        rows: list[Row] = []
        try:
            for case in todo:
                dtype = str(case.dtype).removeprefix("torch.")
                label = f"{case.bench.title} {case.shape} {dtype}"
                progress.update(task, description=label)
                rows += run_case(case, device, limits)
                progress.advance(task)
        except KeyboardInterrupt:
            return limits, rows, True
    return limits, rows, False


@dataclass(frozen=True)
class Grid:
    """The rows of one op, one line per case, with the peers side by side."""

    title: str
    columns: list[str]
    lines: list[list[str]]
    notes: list[str]

    @property
    def numeric(self) -> tuple[int, ...]:
        return tuple(range(3, len(self.columns)))


def _grid(title: str, rows: Sequence[Row]) -> Grid:
    # A peer with no time at all is a note, not two empty columns.
    timed = {row.peer for row in rows if isinstance(row.peer_ms, float)}
    peers = [peer for peer in dict.fromkeys(row.peer for row in rows) if peer in timed]
    flops = any(row.gflops is not None for row in rows)
    columns = ["shape", "dtype", "path", "ms"]
    columns += [column for peer in peers for column in (f"{peer} ms", "ratio")]
    columns += ["GB/s", *(["GFLOP/s"] if flops else []), "of limit", "error"]
    lines = []
    for case in dict.fromkeys((row.shape, row.dtype) for row in rows):
        of_case = {row.peer: row for row in rows if (row.shape, row.dtype) == case}
        row = next(iter(of_case.values()))
        line = [*case, f"{row.backend} {row.variant}".strip(), _cell(row.ms)]
        for peer in peers:
            line += [_cell(of_case[peer].peer_ms), _cell(of_case[peer].ratio)]
        line += [_cell(row.gbps), *([_cell(row.gflops)] if flops else [])]
        line.append("-" if row.limit_fraction is None else f"{row.limit_fraction:.0%}")
        line.append("-" if row.max_error is None else f"{row.max_error:.0e}")
        lines.append(line)
    return Grid(title, columns, lines, _notes(rows))


def _cell(value: float | str | None) -> str:
    """A number, or the first words of a reason, which is told in full below the table."""
    if isinstance(value, str):
        return value.partition(" (")[0] if value.startswith("skipped") else value.partition(":")[0]
    return "-" if value is None else number(value)


def _notes(rows: Sequence[Row]) -> list[str]:
    """Every reason why there is no time, once per side where it is the same for all cases."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for side, ms in (("metalcore", row.ms), (row.peer or "", row.peer_ms)):
            if isinstance(ms, str):
                case = f"{row.shape} {row.dtype}"
                cases_of = reasons.setdefault((side, ms), [])
                if case not in cases_of:
                    cases_of.append(case)
    total = len({(row.shape, row.dtype) for row in rows})
    return [
        f"{side}: {reason}" if len(where) == total else f"{side}, {', '.join(where)}: {reason}"
        for (side, reason), where in reasons.items()
    ]


def _print(machine: Machine, limits: Limits, grids: Sequence[Grid], console: Console) -> None:
    if not console.is_terminal:
        # A file has no width that could be too small.
        console = Console(width=160)
    for grid in grids:
        table = Table(title=grid.title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for i, column in enumerate(grid.columns):
            # In a narrow terminal the path wraps, and the numbers stay whole.
            table.add_column(
                column.replace(" ", "\n"),
                justify="right" if i in grid.numeric else "left",
                no_wrap=column != "path",
                overflow="fold",
            )
        for line in grid.lines:
            table.add_row(*line)
        console.print(table)
        for note in grid.notes:
            console.print(note, style="yellow", highlight=False, markup=False)
    console.print(f"\n{machine}\n{_limits_text(limits)}", highlight=False)


def _limits_text(limits: Limits) -> str:
    return (
        f"Limits measured in this run: copy {limits.memory_gbps:.0f} GB/s from memory and up to "
        f"{limits.cached_gbps:.0f} GB/s from cache (bytes read and written), float32 matmul "
        f"{limits.matmul_gflops:.0f} GFLOP/s. A case is compared with the copy of its own size."
    )


def _html(
    machine: Machine,
    limits: Limits,
    rows: Sequence[Row],
    grids: Sequence[Grid],
    benches: Sequence[Bench],
) -> str:
    sections: list[Section] = []
    plotted: dict[str, list[Bench]] = {}
    for bench in benches:
        if bench.plot_over:
            plotted.setdefault(bench.title, []).append(bench)
    for grid in grids:
        of_op = [row for row in rows if row.op == grid.title]
        if grid.title in plotted:
            sections.append(_curves(plotted[grid.title], of_op))
            sections.append(HtmlTable(grid.title, grid.columns, grid.lines, grid.numeric))
            continue
        for peer in dict.fromkeys(row.peer for row in of_op):
            ratios = {(row.shape, row.dtype): row.ratio for row in of_op if row.peer == peer}
            if any(ratio is not None for ratio in ratios.values()):
                name = f"{grid.title}: times as fast as {peer}"
                sections.append(_bars(name, "times as fast", ratios, 1.0, "equal"))
        shares = {
            (row.shape, row.dtype): row.limit_fraction and 100 * row.limit_fraction for row in of_op
        }
        if any(share is not None for share in shares.values()):
            name = f"{grid.title}: share of this machine's limit"
            sections.append(_bars(name, "percent of the limit", shares, 100.0, "limit"))
        notes = "; ".join(grid.notes)
        sections.append(HtmlTable(grid.title, grid.columns, grid.lines, grid.numeric, notes))
    intro = [
        str(machine),
        "Every result is compared with a float64 reference before it is timed. Times are the "
        "fastest of many rounds, in which metalcore and its peers take turns. The ratio is the "
        "peer's time divided by metalcore's: above 1, metalcore is faster. The error is the "
        "largest difference from the reference, relative to its largest value.",
        _limits_text(limits),
    ]
    return page("metalcore bench", intro, sections)


def _curves(benches: Sequence[Bench], rows: Sequence[Row]) -> Lines:
    """The ratio to the fastest peer against one variable, a curve each for one and for many."""
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.ratio is not None:
            case = (row.shape, row.dtype)
            best[case] = min(row.ratio, best.get(case, math.inf))
    over = benches[0].plot_over or ""
    curves: dict[str, dict[float, float]] = {}
    names: dict[float, str] = {}
    for case in cases(benches):
        dtype = str(case.dtype).removeprefix("torch.")
        if (case.shape, dtype) in best:
            x = math.log2(max(1, case.point[over]))
            names[x] = str(case.point[over])
            many = "batches, " if case.point.get("batch", 1) > 1 else ""
            curves.setdefault(many + dtype, {}).setdefault(x, best[case.shape, dtype])
    return Lines(
        f"{benches[0].title}: times as fast as the fastest peer",
        over,
        "times as fast",
        {name: sorted(curve.items()) for name, curve in curves.items()},
        from_zero=True,
        x_names=names,
        line=1.0,
    )


def _bars(
    title: str, unit: str, values: dict[tuple[str, str], float | None], line: float, label: str
) -> Bars:
    shapes = list(dict.fromkeys(shape for shape, _ in values))
    dtypes = list(dict.fromkeys(dtype for _, dtype in values))
    series = {d: [values.get((s, d)) for s in shapes] for d in dtypes}
    return Bars(title, unit, shapes, series, line=line, line_label=label)


def _machine(device: str) -> Machine:
    return Machine(
        processor=_processor(),
        system=f"{platform.system()} {platform.machine()}",
        device=device,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        kernels=_native.isa or f"none ({_native.problem})",
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _processor() -> str:
    """The processor's name as the system tells it."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
