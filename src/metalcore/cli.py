# SPDX-License-Identifier: MIT
"""The `metalcore` command."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    name="metalcore",
    help="Fast primitives for PyTorch on Apple GPUs and any CPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        import metalcore

        typer.echo(f"metalcore {metalcore.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Fast primitives for PyTorch on Apple GPUs and any CPU."""


@app.command()
def doctor(
    as_json: Json = False,
    all_checks: Annotated[bool, typer.Option("--all", help="Also what works, op by op.")] = False,
) -> None:
    """Check versions, kernels and results; exit code 1 when something is broken."""
    from metalcore import doctor as it

    report = it.examine()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        it.show(report, all_checks)
    raise typer.Exit(0 if report["ok"] else 1)


@app.command()
def info(
    op: Annotated[str | None, typer.Argument(help="An op; without it, all of them.")] = None,
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option(help="Print the table of docs/ops.md.")] = False,
) -> None:
    """Show what an op takes and where it runs."""
    from metalcore import info as it

    if markdown:
        typer.echo(it.markdown(), nl=False)
        return
    try:
        found = [it.describe(name) for name in ([op] if op else it.names())]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        typer.echo(json.dumps(found[0] if op else found, indent=2))
        return
    for entry in found:
        table = Table(show_header=False, box=None)
        table.add_row("[bold]op[/]", f"[bold]{entry['op']}[/]")
        table.add_row("files", f"*/{entry['files']}.*")
        table.add_row("schema", entry["schema"])
        for backend, dtypes in entry["backends"].items():
            table.add_row(backend, ", ".join(dtypes) or "no kernel")
        for backend, values in entry["policy"].items():
            for key, value in values.items():
                table.add_row(f"policy {backend}", f"{key} = {value}")
        Console().print(table, "")


@app.command()
def bench(
    ops: Annotated[list[str] | None, typer.Argument(help="family/op; default all.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results here.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page here.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    store: Annotated[bool, typer.Option("--store", help="Keep for the docs.")] = False,
    docs: Annotated[bool, typer.Option("--docs", help="Only write the docs of those.")] = False,
    sim: Annotated[
        bool, typer.Option("--sim", help="What the Metal kernels would cost an Apple GPU.")
    ] = False,
    peers: Annotated[
        Path | None,
        typer.Option(
            help="With --sim: beside kernels of the mlx and torch wheels, and of checkouts named "
            "mlx and pytorch in this folder.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Also time torch.compile.")] = False,
) -> None:
    """Time ops side by side with their peers, after checking that both are right."""
    from metalcore.bench import beside, counters
    from metalcore.bench.run import run, select, write_documents
    from metalcore.doctor import restart_where_bfloat16_is_broken

    if docs:
        raise typer.Exit(write_documents())
    if peers is not None:
        raise typer.Exit(beside.run(peers, keep=store))
    if sim:
        try:
            benches = select(ops or [])
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        raise typer.Exit(counters.run(benches, json_file))
    restart_where_bfloat16_is_broken()
    raise typer.Exit(run(ops or [], json_file, html_file, threads, compile=compile, keep=store))


@app.command()
def tune(
    ops: Annotated[list[str] | None, typer.Argument(help="Ops; default all.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Only print what applies here.")] = False,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    packaged: Annotated[
        bool,
        typer.Option("--packaged", help="Write the file of this machine class in the package."),
    ] = False,
) -> None:
    """Measure from which sizes on metalcore is ahead of torch here, and follow that from now on."""
    import os

    import torch

    from metalcore import _policy
    from metalcore import tune as it

    if threads is not None:
        torch.set_num_threads(threads)
    if packaged:
        os.environ["METALCORE_POLICY"] = os.devnull
        _policy.changed()
    try:
        if show:
            it.show(ops or [])
        else:
            it.run(ops or [], _policy.packaged_file() if packaged else _policy.user_file())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps for each model.")] = 30,
    html_file: Annotated[Path, typer.Option("--html", help="The report.")] = Path("report.html"),
    device: Annotated[str | None, typer.Option(help="cpu or mps; default the best.")] = None,
) -> None:
    """Train a small language model with and without metalcore, side by side."""
    from metalcore.demo import run

    raise typer.Exit(run(steps, html_file, device))


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }
)
def run(
    context: typer.Context,
    program: Annotated[str, typer.Argument(help="A Python file, or -m and a module.")],
) -> None:
    """Run a training program; each Trainer of transformers or TRL in it accelerates its model."""
    from metalcore.integrations import run_program

    run_program([program, *context.args])
