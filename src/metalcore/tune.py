# SPDX-License-Identifier: MIT
"""`metalcore tune`: from where on ours is ahead of torch on this machine, for a policy file.

Both sides are the public function with its route forced, so that checks and calls count as users
pay them. A replaced function of torch costs a little more: ours must be ahead by more than that, so
that one table serves functions and overrides.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf, isnan, nan
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import metalcore
from metalcore import _policy
from metalcore._check import one_of
from metalcore._measure import processor
from metalcore._route import Kind, Matrices, Queries, Route, Rows, Systems
from metalcore.metal.run import has_metal_kernels

# What is measured: values, lengths of rows, sides of matrices and how many of them.
_VALUES = [64 << k for k in range(15)]
_LENGTHS = (4, 16, 64, 256, 1024, 4096)
_SIDES = (4, 8, 16, 32, 64, 128, 256, 512)
_BATCHES = (1, 2, 3, 4, 6, 10, 20, 50, 150, 500)
_MOST_IN_MATRICES = 1 << 19
_QUERIES = (1, 4, 16, 64, 256, 1024)
_HEADS, _HEAD_SIZE, _MOST_QUERIES = (1, 2, 4, 8, 16, 32), 64, 1 << 18
_THREADS = (32, 64, 128, 256, 512)
# Seconds for each of these, and by how much ours must be ahead: less is noise.
_SECONDS = 0.02
_AHEAD = 1.02


class Scan(NamedTuple):
    """Counts, ascending, at one length; `make` gives the tensor that a route is decided by."""

    length: int
    counts: Sequence[int]
    make: Callable[[int], Tensor]


def run(ops: Sequence[str], file: Path) -> None:
    """Measure the routes of `ops` (all, where none is named), write and print what was found."""
    routes, console = select(ops), Console()
    console.print(f"{measured()}: {len(routes)} routes", highlight=False)
    margin = override_cost()
    how = f'measured = "{measured()}"'
    write(file, "override", f"{how}\nmargin_us = {margin * 1e6:.2f}")
    every = [(route, kind) for route in routes for kind in route.kinds()]
    with Progress(console=console) as progress:
        task = progress.add_task("", total=sum(len([*scans(*row)]) for row in every))
        for route in routes:
            lines = [how]
            for kind in route.kinds():
                progress.update(task, description=f"{route.name} {kind}")
                found = []
                for scan in scans(route, kind):
                    found.append((scan.length, *crossover(route, kind, scan, margin)))
                    progress.advance(task)
                lines.append(f"{kind} = {_row(*zip(*found, strict=True))}")
            # at once, because the next route may stand on this one
            write(file, route.name, "\n".join(lines))
        for op in _launched(routes):
            progress.update(task, description=f"{op} on mps")
            write(file, f"{op}.metal", f"threads = {best_threads(op)}")
    show(ops)
    console.print(f"written to {file}; the next call follows it", highlight=False)


def select(ops: Sequence[str]) -> list[Route]:
    """The routes of ops; those that others stand on come first."""
    known = dict.fromkeys(route.op for route in Route.all.values())
    unknown = [op for op in ops if op not in known]
    if unknown:
        raise ValueError(f"tune: OP must be an op that torch has too, {one_of(known, unknown)}")
    return [route for route in Route.all.values() if not ops or route.op in ops]


def scans(route: Route, kind: Kind) -> Iterator[Scan]:
    """What is measured for one row of a route."""
    if isinstance(route, (Matrices, Systems)):
        for side in _SIDES:
            columns = max(1, side // 4) if "tall" in kind.form else side
            if isinstance(route, Systems):
                right_sides = {"vector": 1, "few": min(4, side // 4)}.get(kind.form, side)
                yield _matrices(side, right_sides, side, _BATCHES)
            else:
                yield _matrices(
                    side, columns, columns, [1] if "alone" in kind.form else _BATCHES[1:]
                )
    elif isinstance(route, Queries):
        for length in _QUERIES:
            yield _queries(length)
    elif isinstance(route, Rows):
        for length in _LENGTHS:
            yield _rows(length)
    else:
        yield Scan(0, _VALUES, torch.randn)


def _matrices(side: int, columns: int, most_columns: int, batches: Sequence[int]) -> Scan:
    """`most_columns` are those of the largest matrix of an example."""
    largest = _MOST_IN_MATRICES // (side * most_columns)
    counts = [b for b in batches if b <= max(batches[0], largest)]
    # a single matrix has no dimension for its batch
    return Scan(side, counts, lambda b: torch.randn(*([b] if b > 1 else []), side, columns))


def _queries(length: int) -> Scan:
    heads = [n for n in _HEADS if n * length * _HEAD_SIZE <= _MOST_QUERIES]
    counts = [n * length * _HEAD_SIZE for n in heads]
    return Scan(
        length, counts, lambda n: torch.randn(1, n // (length * _HEAD_SIZE), length, _HEAD_SIZE)
    )


def _rows(length: int) -> Scan:
    counts = [n for n in _VALUES if n >= length]
    return Scan(length, counts, lambda n: torch.randn(n // length, length))


def crossover(route: Route, kind: Kind, scan: Scan, margin: float) -> tuple[float, float]:
    """The count from which on ours stays ahead (1 for all), and torch's time by ours there.

    Looked for from the top, so that a lucky small count is not taken, and ended where torch is
    ahead twice. A count that ours wins by less than `margin` decides nothing.
    """
    start, ratio, behind = inf, 0.0, 0
    for count in reversed(scan.counts):
        theirs, ours = race(route, kind, scan.make(count))
        ratio = ratio or theirs / ours
        if theirs >= _AHEAD * (ours + margin):
            start, ratio, behind = count, theirs / ours, 0
        elif theirs < ours:
            behind += 1
        if behind == 2:
            break
    return 1 if start == scan.counts[0] else start, ratio


def race(route: Route, kind: Kind, x: Tensor) -> tuple[float, float]:
    """Seconds per call of torch and of ours: the best of turns."""
    call = _call(route, kind, x)
    best, counts = [inf, inf], [1, 1]
    end, turns = time.perf_counter() + _SECONDS, 0
    while turns < 4 or time.perf_counter() < end:
        for side in (0, 1):
            with route.forced(to_torch=side == 0):
                best[side] = min(best[side], _seconds(call, counts[side]))
            counts[side] = max(1, min(1000, int(2e-4 / best[side])))
        turns += 1
    return best[0], best[1]


def _call(route: Route, kind: Kind, x: Tensor) -> Callable[[], Any]:
    """A call of the public function, with its gradient where that is recorded."""
    function: Callable[..., Any] = getattr(metalcore, route.op)
    args = list(route.arguments(x.to(kind.dtype)))
    for i, a in enumerate(args):
        if kind.is_recorded and isinstance(a, Tensor) and a.is_floating_point():
            args[i] = a.clone().requires_grad_()
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]

    def differentiate() -> None:
        outputs = function(*args)
        made = [y for y in ([outputs] if isinstance(outputs, Tensor) else outputs) if y.grad_fn]
        torch.autograd.grad(made, leaves, [torch.ones_like(y) for y in made], allow_unused=True)

    return differentiate if leaves else lambda: function(*args)


def _seconds(call: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def override_cost() -> float:
    """Seconds by which a replaced function of torch takes longer than the public one, both ours."""
    x, A = torch.randn(1, 64), torch.randn(4, 4)
    costs = [0.0]
    for op, public, replaced in (
        ("silu", lambda: metalcore.silu(x), lambda: torch.nn.functional.silu(x)),
        ("qr", lambda: metalcore.qr(A), lambda: torch.linalg.qr(A)),
    ):
        with Route.all[op].forced(to_torch=False), metalcore.overrides():
            turns = [(_seconds(replaced, 200), _seconds(public, 200)) for _ in range(9)]
        costs.append(min(turn[0] for turn in turns) - min(turn[1] for turn in turns))
    return max(costs)


def _launched(routes: Sequence[Route]) -> list[str]:
    """Ops of which the Metal kernel's threads are to be chosen: on a Mac alone."""
    if not has_metal_kernels():
        return []
    ops = dict.fromkeys(route.op for route in routes)
    return [op for op in ops if "threads" in _policy.policy(op, "metal")]


def best_threads(op: str) -> int:
    """The threads per group with which the Metal kernels of `op` are fastest on large arguments.

    Not run yet on an Apple GPU.
    """
    route = next(route for route in Route.all.values() if route.op == op)
    *_, scan = scans(route, route.kinds()[0])
    args = route.arguments(scan.make(scan.counts[-1]))
    args = tuple(a.to("mps") if isinstance(a, Tensor) else a for a in args)
    function: Callable[..., Any] = getattr(metalcore, op)

    def call() -> None:
        function(*args)
        torch.mps.synchronize()

    values, took = _policy.policy(op, "metal"), {}
    for threads in _THREADS:
        values["threads"] = threads
        _policy.tell()
        took[threads] = min(_seconds(call, 20) for _ in range(5))
    _policy.changed()
    return min(took, key=lambda threads: took[threads])


def measured() -> str:
    """This machine, in the words that stand beside its numbers."""
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} threads"
    return f"{processor()}, {_policy.machine_class()}, {threads}, torch {torch.__version__}"


def _row(lengths: Sequence[int], starts: Sequence[float], ratios: Sequence[float]) -> str:
    """A row as a policy file has it; Values have no lengths."""
    rounded = [f"{ratio:.2f}" for ratio in ratios]
    if not lengths[0]:
        return f"{{ from = {starts[0]}, ratio = {rounded[0]} }}"
    lists = ", ".join(map(str, lengths)), ", ".join(map(str, starts)), ", ".join(rounded)
    return "{{ up_to = [{}], from = [{}], ratio = [{}] }}".format(*lists)


def write(file: Path, name: str, body: str) -> None:
    """Put a table into a policy file in place of one of that name; the rest stays as it is."""
    text = file.read_text() if os.path.exists(file) else ""
    parts = re.split(r"(?m)^(?=\[)", text)
    kept = [part.strip("\n") for part in parts if not part.startswith(f"[{name}]")]
    _replace(file, "\n\n".join(filter(None, (*kept, f"[{name}]\n{body}"))) + "\n")
    _policy.changed()


def _replace(file: Path, text: str) -> None:
    """All or nothing: a full disk leaves the file as it was."""
    if file.parts[0] == "~":
        raise ValueError("tune: this user has no home folder; METALCORE_POLICY names a file")
    if os.path.exists(file) and not file.is_file():
        raise ValueError(f"tune: {file} is no file; METALCORE_POLICY names another")
    file = file.resolve()
    made = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(text)
        made.replace(file)
    except OSError as error:
        if os.path.exists(made):
            made.unlink()
        raise OSError(
            f"tune: cannot write {file}: {error.strerror}; METALCORE_POLICY names another file"
        ) from None


def show(ops: Sequence[str]) -> None:
    """Print what applies here, and where each number comes from."""
    console, routes = Console(), select(ops)
    console.print(f"This machine: {measured()}", highlight=False)
    sources: dict[str, int] = {}
    tables: dict[tuple[int, ...], Table] = {}
    for route in routes:
        for kind, (row, source) in route.sources().items():
            lengths = tuple(row.up_to)
            if lengths not in tables:
                title = "ours from so many values, or matrices of a side"
                heads = [f"<= {length}" for length in lengths] or [""]
                tables[lengths] = Table("op", "for", *heads, "[ ]", title=title)
            note = sources.setdefault(source, len(sources) + 1)
            cells = map(_cell, row.starts, row.ratios or [nan] * len(row.starts))
            tables[lengths].add_row(route.name, str(kind), *cells, f"[{note}]")
    for table in tables.values():
        console.print(table)
    for source, note in sources.items():
        console.print(f"[{note}] {source}", highlight=False, markup=False)
    for file, values in _policy.tables("override")[-1:]:
        margin = f"A replaced function of torch takes {values['margin_us']} us more than ours"
        console.print(f"{margin}: {values['measured']} ({file})", highlight=False)
    without = ", ".join(route.name for route in routes if not route.sources())
    console.print(f"Ours always, for want of a number: {without or 'none'}", highlight=False)
    console.print(_kernels(dict.fromkeys(route.op for route in routes)))


def _cell(start: float, ratio: float) -> str:
    count = {1: "always", inf: "never"}.get(start, str(start))
    return count if isnan(ratio) else f"{count}\n{ratio}x"


def _kernels(ops: Iterable[str]) -> Table:
    """The numbers of the kernels of ops, and their files."""
    table = Table("op", "number", "value", "file", title="numbers of kernels")
    for op in ops:
        for backend in ("cpu", "metal"):
            files = _policy.tables(f"{op}.{backend}")
            for name, value in _policy.policy(op, backend).items():
                where = [file.name for file, values in files if name in values]
                place = where[-1] if where else "built in"
                table.add_row(f"{op}.{backend}", name, str(value), place)
    return table
