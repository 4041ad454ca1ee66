# SPDX-License-Identifier: MIT
"""The command line: check, run, lint and profile kernels."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import typer.core
from rich.console import Console
from rich.markup import escape

from . import fits as fits_of_source
from . import lint as lint_source
from . import profile as profile_kernel
from . import run as run_kernel
from . import trace as trace_kernel
from .compiler import CommandFailed, CompilerMissing
from .fit import Fit, table
from .library import CHECKS, COST
from .memory import Uninitialized
from .profiling import Profile
from .report import Finding, KernelError, Report
from .spec import Spec
from .spec import load as load_spec


class _Commands(typer.core.TyperGroup):
    """What a command cannot do, it says in one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, TypeError, KeyError, OSError, CompilerMissing, CommandFailed) as error:
            what = error.args[0] if isinstance(error, KeyError) else error
            typer.echo(f"mslsim: {what}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    help="Run and check Metal compute kernels on any machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_console = Console(highlight=False, soft_wrap=True)

Metal = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Metal source file")]
Launch = Annotated[
    Path, typer.Option("--spec", exists=True, dir_okay=False, help="launch file (TOML)")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Include = Annotated[list[Path] | None, typer.Option("-I", help="folder for #include")]
Sources = Annotated[
    list[Path], typer.Argument(exists=True, dir_okay=False, help="Metal source files")
]
Define = Annotated[list[str] | None, typer.Option("-D", help="macro, NAME=VALUE")]


def _text(kernel: Path) -> str:
    try:
        return kernel.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{kernel}: must be UTF-8 text") from None


def _run(kernel: Path, spec: Spec, include: list[Path] | None, checks: str | None) -> Report:
    options = {"name": str(kernel), **spec.options}
    folders = [str(kernel.parent), *map(str, include or ()), *spec.options.get("include", ())]
    options["include"] = folders
    if checks is not None:
        options["checks"] = checks
    options.setdefault("checks", CHECKS | {COST})
    return run_kernel(
        _text(kernel), spec.kernel, spec.arguments, spec.threads, spec.group_size, **options
    )


def _print(findings: list[Finding]) -> None:
    for f in findings:
        severity, colour = ("note", "cyan") if f.is_note else ("error", "red")
        where, _, what = f.diagnostic.partition(f"{severity}: ")
        _console.print(f"[bold]{escape(where)}[/][{colour}]{severity}:[/] {escape(what)}")


@app.command()
def check(kernel: Metal, spec: Launch, as_json: Json = False, include: Include = None) -> None:
    """Run a kernel under all checks, for what is wrong and what is slow; exit with 1 when something
    is found."""
    report = _run(kernel, load_spec(spec), include, None)
    if as_json:
        print(report.to_json())
    else:
        _print([*report.findings, *report.notes])
        count = len(report.findings)
        verdict = "no findings" if report.ok else f"{count} finding{'s' if count > 1 else ''}"
        _console.print(f"{report.kernel}: {verdict}")
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def run(
    kernel: Metal,
    spec: Launch,
    output: Annotated[Path, typer.Option("-o", help="folder for the results")] = Path("results"),
    as_json: Json = False,
    include: Include = None,
) -> None:
    """Run a kernel without checks and write its buffers as .npy files."""
    launch = load_spec(spec)
    report = _run(kernel, launch, include, "none")
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for name, value in zip(launch.names, launch.arguments, strict=True):
        array = value.array if isinstance(value, Uninitialized) else value
        if isinstance(array, np.ndarray):
            np.save(output / f"{name}.npy", array)
            written.append(str(output / f"{name}.npy"))
    if as_json:
        print(json.dumps({**json.loads(report.to_json()), "outputs": written}, indent=2))
    else:
        _print(report.findings)
        for path in written:
            _console.print(f"wrote {path}")
    raise typer.Exit(0 if report.ok else 1)


def _reading(kernel: Path, include: list[Path] | None, define: list[str] | None) -> dict[str, Any]:
    """How to read a source."""
    defines = dict(d.partition("=")[::2] for d in define or ())
    return {
        "name": str(kernel),
        "include": [str(kernel.parent), *map(str, include or ())],
        "defines": {k: v or "1" for k, v in defines.items()},
    }


@app.command()
def fit(
    kernels: Sources, as_json: Json = False, include: Include = None, define: Define = None
) -> None:
    """Tell what kernels take of an Apple GPU: registers, largest threadgroup, bytes of code."""
    found: dict[str, Fit] = {}
    try:
        for kernel in kernels:
            found |= fits_of_source(_text(kernel), **_reading(kernel, include, define))
    except KernelError as error:
        _print(error.findings)
        raise typer.Exit(1) from None
    if as_json:
        plain = {n: {**asdict(f), "largest_group": f.largest_group} for n, f in found.items()}
        print(json.dumps(plain, indent=2))
    else:
        print("\n".join(table(found)))


@app.command()
def lint(
    kernels: Sources,
    as_json: Json = False,
    include: Include = None,
    define: Define = None,
    registers: Annotated[
        bool, typer.Option("--registers", help="also what takes too much of a GPU")
    ] = False,
) -> None:
    """Report what Apple's compiler would refuse, without running anything."""
    findings = []
    for kernel in kernels:
        reading = _reading(kernel, include, define)
        findings += lint_source(_text(kernel), registers=registers, **reading)
    if as_json:
        print(json.dumps([asdict(f) for f in findings], indent=2))
    else:
        _print(findings)
    raise typer.Exit(1 if findings else 0)


@app.command()
def example(
    folder: Annotated[Path, typer.Argument(help="where to write it")] = Path(),
) -> None:
    """Write a kernel with a bug and a launch of it, and check it: the first bug."""
    from . import example as text

    kernel, launch = folder / "total.metal", folder / "total.toml"
    for path in (kernel, launch):
        if path.exists():
            raise ValueError(f"{path} exists; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    kernel.write_text(text.KERNEL)
    launch.write_text(text.LAUNCH)
    print(f"wrote {kernel} and {launch}\n")
    _print(_run(kernel, load_spec(launch), None, None).findings)
    print(text.ADVICE.format(kernel=kernel, launch=launch))


@app.command()
def doctor() -> None:
    """Tell what is used and how checked kernels are isolated."""
    from . import isolated
    from .cache import cache_directory, size_limit
    from .compiler import toolchain

    tools = toolchain()
    with isolated.lock:
        given_up = isolated.worker().isolation()
    parts = {"files": "files", "network": "the network", "processes": "other processes"}
    lost = [what for part, what in parts.items() if part in given_up]
    kept = [what for part, what in parts.items() if part not in given_up]
    print(f"compiler: {tools.driver[0]}")
    print(f"cache: {cache_directory()}, up to {size_limit() >> 20} MiB")
    if lost:
        print(f"checked kernels cannot reach {', '.join(lost)}")
    if kept:
        print(f"checked kernels can reach {', '.join(kept)}: nothing here keeps them from it")


@app.command()
def trace(
    kernel: Metal,
    spec: Launch,
    thread: Annotated[str, typer.Option("--thread", help="position in the grid: x,y,z")] = "0,0,0",
    as_json: Json = False,
    include: Include = None,
) -> None:
    """List what one thread of a launch does: loads, stores, branches, barriers."""
    launch = load_spec(spec)
    if not all(part.strip().isdigit() for part in thread.split(",")):
        raise ValueError(f"--thread must be up to three numbers, as 5,0,0, got {thread!r}")
    options = {"name": str(kernel), **launch.options}
    options["include"] = [
        str(kernel.parent), *map(str, include or ()), *launch.options.get("include", ())
    ]  # fmt: skip
    at = [int(part) for part in thread.split(",")]
    grid = (launch.threads, launch.group_size)
    report = trace_kernel(_text(kernel), launch.kernel, launch.arguments, *grid, at, **options)
    if as_json:
        print(json.dumps([asdict(s) for s in report.steps], indent=2))
    else:
        for step in report.steps:
            _console.print(escape(str(step)))
        _print(report.findings)
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def profile(
    kernel: Metal,
    spec: Launch,
    chip: Annotated[
        list[str] | None, typer.Option("--chip", help="M1, 'M2 Max' ...; all for every one")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="page to write")] = None,
    compare: Annotated[
        Path | None,
        typer.Option("--compare", exists=True, dir_okay=False, help="older source, for ratios"),
    ] = None,
    as_json: Json = False,
    include: Include = None,
) -> None:
    """Tell what a launch would cost an Apple GPU: bytes, issue slots by line, time by chip."""
    from . import model, profile_page, profile_report

    every = list(model.chips())
    names = every if chip == ["all"] else [model.chip(n).name for n in chip or model.USUAL]
    try:
        found = _profile(kernel, load_spec(spec), include)
        # A launch changes its arguments, so the older kernel gets its own.
        old = _profile(compare, load_spec(spec), include) if compare else None
    except KernelError as problem:
        _print(problem.findings)
        raise typer.Exit(1) from None
    lines = profile_report.source_lines(found, str(kernel), _text(kernel))
    ratios = profile_report.ratios(found, old, names) if old else {}
    if html is not None:
        html.write_text(profile_page.page(found, names, lines), encoding="utf-8")
    if as_json:
        print(json.dumps({**found.as_dict(names), **({"ratios": ratios} if old else {})}, indent=2))
        return
    profile_report.show(found, names, lines, _console)
    if old:
        profile_report.show_ratios(ratios, _console)
    if html is not None:
        _console.print(f"\nwrote {html}")


def _profile(kernel: Path, spec: Spec, include: list[Path] | None) -> Profile:
    options = {k: v for k, v in spec.options.items() if k not in ("checks", "order")}
    options["include"] = [str(kernel.parent), *map(str, include or ()), *options.pop("include", ())]
    return profile_kernel(
        _text(kernel),
        spec.kernel,
        spec.arguments,
        spec.threads,
        spec.group_size,
        name=str(kernel),
        **options,
    )
