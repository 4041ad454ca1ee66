# SPDX-License-Identifier: MIT
"""What a run measured, as tables in a terminal and as an HTML page with plots."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from metalcore._check import dtype_name
from metalcore._report import Bars, Lines, Section, number, page
from metalcore._report import Table as HtmlTable

from .harness import Bench, Row, cases
from .limits import Limits
from .machine import Machine

# What the tables show as more than 100 %.
_ABOVE_LIMIT = 1.005


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


def _grids(rows: Sequence[Row]) -> list[Grid]:
    titles = dict.fromkeys(row.op for row in rows)
    return [_grid(title, [row for row in rows if row.op == title]) for title in titles]


def _grid(title: str, rows: Sequence[Row]) -> Grid:
    # A peer with no time at all is a note, not two empty columns.
    timed = {row.peer for row in rows if isinstance(row.peer_ms, float)}
    peers = [peer for peer in dict.fromkeys(row.peer for row in rows) if peer in timed]
    flops = any(row.gflops is not None for row in rows)
    memory = any(row.mib is not None for row in rows)
    columns = ["shape", "dtype", "path", "ms"]
    columns += [column for peer in peers for column in (f"{peer} ms", "ratio")]
    columns += ["GB/s", *(["GFLOP/s"] if flops else []), "of limit", "error"]
    columns += ["MiB", *(f"{peer} MiB" for peer in peers)] if memory else []
    lines = []
    for case in dict.fromkeys((row.shape, row.dtype) for row in rows):
        of_case = {row.peer: row for row in rows if (row.shape, row.dtype) == case}
        row = next(iter(of_case.values()))
        # a peer may take only some of the cases
        beside = [of_case.get(peer) for peer in peers]
        line = [*case, f"{row.backend} {row.variant}".strip(), _cell(row.ms)]
        for other in beside:
            line += [_cell(other and other.peer_ms), _cell(other and other.ratio)]
        line += [_cell(row.gbps), *([_cell(row.gflops)] if flops else [])]
        line.append("-" if row.limit_fraction is None else f"{row.limit_fraction:.0%}")
        line.append("-" if row.max_error is None else f"{row.max_error:.0e}")
        if memory:
            line += [_cell(row.mib), *(_cell(other and other.peer_mib) for other in beside)]
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


def show(machine: Machine, limits: Limits, rows: Sequence[Row], console: Console) -> None:
    if not console.is_terminal:
        # A file has no width that could be too small.
        console = Console(width=160)
    for grid in _grids(rows):
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
    for doubt in doubts(machine, rows):
        console.print(doubt, style="yellow", highlight=False)


def doubts(machine: Machine, rows: Sequence[Row]) -> list[str]:
    """Signs that something else was running."""
    found = []
    if machine.is_busy:
        found.append(
            f"This machine was busy (load {machine.load:.1f} on {machine.cores} cores) before the "
            "first measurement: do not trust these figures."
        )
    above = sum((row.limit_fraction or 0) > _ABOVE_LIMIT for row in rows)
    if above:
        found.append(
            f"{above} of {len(rows)} rows are above the limits that were measured: if something "
            "else was running then, run it again."
        )
    return found


def _limits_text(limits: Limits) -> str:
    products = " and ".join(f"{v:.0f} in {dtype_name(d)}" for d, v in limits.product_gflops.items())
    return (
        f"Limits measured in this run: copy {limits.memory_gbps:.0f} GB/s from memory and up to "
        f"{limits.cached_gbps:.0f} GB/s from cache (bytes read and written), products "
        f"{products} (GFLOP/s). A case is compared with the copy of its own size."
    )


def html(machine: Machine, limits: Limits, rows: Sequence[Row], benches: Sequence[Bench]) -> str:
    sections: list[Section] = []
    plotted: dict[str, list[Bench]] = {}
    for bench in benches:
        if bench.plot_over:
            plotted.setdefault(bench.title, []).append(bench)
    for grid in _grids(rows):
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
        *doubts(machine, rows),
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
