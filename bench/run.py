# SPDX-License-Identifier: MIT
"""`metalcore bench`: finds the benchmarks, runs them, and reports as table, JSON and HTML."""

import importlib
import json as json_format
import pkgutil
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import metalcore
from metalcore._check import dtype_name, one_of

from . import __path__ as _folders
from . import documents, report, store
from .compiled import against_compiler
from .harness import Bench, Row, cases, run_case
from .limits import PRODUCTS, WORKING_SETS, Limits, measure
from .machine import this_machine


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
        families = {name.partition("/")[0] for name in found}
        names = [*sorted(families), *sorted(found)]
        raise ValueError(f"bench: takes <family>/<op> or <family>, {one_of(names, unknown)}")
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
    keep: bool = False,
) -> int:
    """Run benchmarks and report.

    Args:
        selection: `<family>/<op>` or `<family>`; empty for all.
        json: file to write the rows to, with the machine and its limits.
        html: file to write a page with plots to.
        threads: CPU threads to use; default what torch uses.
        device: `cpu` or `mps`; default mps where there is one.
        compile: also compare with torch.compile, in the end; the compiler takes minutes.
        keep: store the rows in `bench/results` and write the pages that quote them.

    Returns:
        0; 1 if a metalcore result was wrong or failed; 2 if the selection names nothing or cannot
        be stored; 130 if it was interrupted, after a report of what was measured before.
    """
    console = Console()
    if threads is not None:
        torch.set_num_threads(threads)
    device = device or ("mps" if metalcore.has_metal_kernels() else "cpu")
    machine = this_machine(device)
    try:
        benches = _in_order(select(selection), compile)
        if keep:
            store.check(machine, whole=not selection)
    except ValueError as problem:
        Console(stderr=True).print(str(problem), style="red", highlight=False)
        return 2
    limits, rows, interrupted = _measure(benches, device, console)
    written = [file for file in (json, html) if file is not None]
    if json is not None:
        content = {
            "machine": vars(machine),
            "limits": {
                "copy_gbps": {str(size): gbps for size, gbps in limits.copy_gbps.items()},
                "product_gflops": {dtype_name(d): v for d, v in limits.product_gflops.items()},
            },
            "rows": [row.as_dict() for row in rows],
        }
        json.write_text(json_format.dumps(content, indent=1) + "\n")
    if html is not None:
        html.write_text(report.html(machine, limits, rows, benches), encoding="utf-8")
    report.show(machine, limits, rows, console)
    if keep and not interrupted:
        titles = {bench.title for bench in benches}
        written.append(store.add(machine, rows, titles, whole=not selection))
    for file in written:
        console.print(f"wrote {file}", highlight=False)
    if interrupted:
        Console(stderr=True).print("interrupted: the report is not complete", style="red")
        return 130
    wrong = any(isinstance(row.ms, str) for row in rows)
    return max(int(wrong), write_documents() if keep else 0)


def _in_order(benches: list[Bench], compile: bool) -> list[Bench]:
    """What to run: compiled programs come last, and only where they are asked for."""
    plain = [b for b in benches if not b.compiles]
    if compile:
        return [*plain, *against_compiler(plain), *(b for b in benches if b.compiles)]
    if not plain:
        names = ", ".join(sorted({b.op for b in benches}))
        raise ValueError(f"bench: {names} takes minutes to compile; add --compile to run it")
    return plain


def write_documents() -> int:
    """Bring the documents up to date with what is stored; 2 if one quotes what is not."""
    console = Console()
    try:
        for file in documents.write():
            console.print(f"wrote {file}", highlight=False)
    except ValueError as problem:
        Console(stderr=True).print(str(problem), style="red", highlight=False)
        return 2
    return 0


def _measure(
    benches: Sequence[Bench], device: str, console: Console
) -> tuple[Limits, list[Row], bool]:
    """The limits, the rows, and whether an interrupt ended it early."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        todo = cases(benches)
        task = progress.add_task("limits", total=len(WORKING_SETS) + len(PRODUCTS) + len(todo))
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
