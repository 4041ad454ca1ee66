# SPDX-License-Identifier: MIT
"""The `metalcore` command."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from metalcore import cli_serve
from metalcore._command import errors_are_messages, use_threads

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
    with errors_are_messages():
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
    with errors_are_messages():
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
    model: Annotated[str, typer.Option(help="llama or xlstm.")] = "llama",
    processes: Annotated[int, typer.Option(help="Train with so many processes and one.")] = 1,
    how: Annotated[str, typer.Option(help="With processes: ddp or fsdp2.")] = "fsdp2",
) -> None:
    """Train a small language model with and without metalcore, side by side."""
    from metalcore._optional import need

    with errors_are_messages():
        for package in ("transformers", "mslsim"):
            need(package, "metalcore demo")
    if processes > 1:
        from metalcore.demo_processes import run as run_processes

        with errors_are_messages():
            raise typer.Exit(run_processes(processes, how, steps))
    from metalcore.demo import run

    with errors_are_messages():
        found = run(steps, html_file, device, model)
    raise typer.Exit(found)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }
)
def run(
    context: typer.Context,
    program: Annotated[
        str, typer.Argument(help="A GGUF file; or a Python file, or -m and a module.")
    ],
) -> None:
    """Let a GGUF model write, or run a training program with every Trainer accelerated.

    `metalcore run MODEL.gguf -p "..."` writes: `metalcore run MODEL.gguf --help` has all options.

    `metalcore run train.py ...` runs a program in which each Trainer of transformers or TRL
    accelerates its model.
    """
    if program.endswith(".gguf"):
        command: Any = typer.main.get_command(app)
        command.commands["generate"].main(
            [program, *context.args], prog_name="metalcore run", standalone_mode=True
        )
        return
    from metalcore.integrations import run_program

    run_program([program, *context.args])


Model = Annotated[Path, typer.Argument(help="A GGUF file.", exists=True, dir_okay=False)]
Tokens = Annotated[int, typer.Option("-n", "--max-tokens", help="At most so many tokens.")]
Temperature = Annotated[
    float, typer.Option("-t", "--temperature", help="0 takes the likeliest token, always.", min=0)
]
TopP = Annotated[float, typer.Option(help="Only the likeliest tokens of this share.", min=0, max=1)]
TopK = Annotated[int, typer.Option(help="Only so many of the likeliest tokens.", min=1)]
Penalty = Annotated[float, typer.Option(help="Above 1, what was said is less likely.", min=0.1)]
Seed = Annotated[int | None, typer.Option(help="The same number gives the same text.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", min=1)]
Device = Annotated[str, typer.Option(help="cpu or mps.")]
Tiles = Annotated[
    Path | None,
    typer.Option(help="A folder that keeps rearranged weights: the next start is quicker."),
]
Adapter = Annotated[
    Path | None,
    typer.Option(help="What `metalcore finetune` saved.", exists=True, file_okay=False),
]


@app.command(hidden=True)
def generate(
    model: Model,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="What to go on with; default: stdin.")
    ] = None,
    max_tokens: Tokens = 256,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    top_k: TopK = 40,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = None,
    adapter: Adapter = None,
    tiles: Tiles = None,
    raw: Annotated[bool, typer.Option("--raw", help="Without the model's chat template.")] = False,
    paths: Annotated[bool, typer.Option("--paths", help="Also what computed each op.")] = False,
    threads: Threads = None,
    device: Device = "cpu",
) -> None:
    """Let a GGUF model go on with a prompt. The text goes to stdout, the speed to stderr."""
    import sys

    from metalcore import chat as it

    sampling = it.Sampling(max_tokens, temperature, top_p, top_k, repetition_penalty, seed)
    with errors_are_messages():
        writer = _writer(model, adapter, tiles, device, threads)
        given = sys.stdin.read() if prompt is None else prompt
        code = it.run(writer, given, sampling, raw=raw, paths=paths)
    raise typer.Exit(code)


@app.command()
def chat(
    model: Model,
    system: Annotated[str | None, typer.Option("-s", "--system", help="Who it is to be.")] = None,
    max_tokens: Tokens = 1024,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    top_k: TopK = 40,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = None,
    adapter: Adapter = None,
    tiles: Tiles = None,
    threads: Threads = None,
    device: Device = "cpu",
) -> None:
    """Talk to a GGUF model. Ctrl-C stops an answer, Ctrl-D ends the conversation."""
    from metalcore import chat as it

    sampling = it.Sampling(max_tokens, temperature, top_p, top_k, repetition_penalty, seed)
    with errors_are_messages():
        code = it.chat(_writer(model, adapter, tiles, device, threads), sampling, system=system)
    raise typer.Exit(code)


@app.command()
def quantize(
    model: Annotated[Path, typer.Argument(help="A folder of transformers, or a GGUF file.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The GGUF file to write.")],
    scheme: Annotated[
        str,
        typer.Option(help="q4_K, q5_K, q6_K, q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl, mxfp4, f16."),
    ] = "q4_K",
) -> None:
    """Write a model as a GGUF file of 4 to 16 bits, for metalcore, llama.cpp and others."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from metalcore.gguf.convert import convert

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with errors_are_messages():
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("quantizing", total=None)
            convert(
                model,
                out,
                scheme,
                lambda name, done, of: progress.update(
                    task, completed=done, total=of, description=name
                ),
            )
        console.print(f"wrote {out}, {out.stat().st_size / 1e6:.1f} MB", highlight=False)


@app.command()
def finetune(
    model: Model,
    data: Annotated[
        Path,
        typer.Argument(
            help='JSONL: {"text"}, {"prompt", "completion"} or {"messages"} per line.',
            exists=True,
            dir_okay=False,
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder of the adapter.")] = Path(
        "adapter"
    ),
    steps: Annotated[int, typer.Option(help="Steps of training.", min=1)] = 100,
    batch_size: Annotated[int, typer.Option(help="Examples per step.", min=1)] = 4,
    learning_rate: Annotated[float, typer.Option("--lr", help="Learning rate.")] = 2e-4,
    rank: Annotated[int, typer.Option(help="Of the adapter's matrices.", min=1)] = 8,
    alpha: Annotated[int, typer.Option(help="Scales the adapter by alpha / rank.", min=1)] = 16,
    length: Annotated[int, typer.Option(help="Longest example, in tokens.", min=2)] = 512,
    seed: Annotated[int, typer.Option(help="The same number gives the same adapter.")] = 0,
    html_file: Annotated[Path, typer.Option("--html", help="The report.")] = Path("finetune.html"),
    threads: Threads = None,
    device: Device = "cpu",
) -> None:
    """Train an adapter on a GGUF model, whose weights stay packed (QLoRA)."""
    from metalcore import finetune as it

    training = it.Training(steps, batch_size, learning_rate, rank, alpha, length, seed)
    console = Console(stderr=True)
    with errors_are_messages():
        use_threads(threads)
        result = it.finetune(
            model, data, out, training, html=html_file, device=device, console=console
        )
        loss = f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}"
        took = f"in {sum(result.seconds):.1f} s"
        console.print(f"{loss} {took}; wrote {out} and {html_file}", highlight=False)
        console.print(f"metalcore chat {model} --adapter {out}", style="bold", highlight=False)


def _writer(
    model: Path, adapter: Path | None, tiles: Path | None, device: str, threads: int | None
) -> Any:
    from metalcore.chat import Writer

    use_threads(threads)
    return Writer(model, adapter=adapter, device=device, tiles=tiles)


app.command("serve")(cli_serve.serve)
