# SPDX-License-Identifier: MIT
"""The command `metalcore serve`."""

from pathlib import Path
from typing import Annotated

import typer

from metalcore._command import errors_are_messages, use_threads
from metalcore._optional import need


def serve(
    model: Annotated[
        Path, typer.Argument(help="A GGUF file, or a folder of transformers.", exists=True)
    ],
    host: Annotated[
        str, typer.Option(help="Where to listen; 127.0.0.1 is heard on this machine alone.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            help="Clients must send it: `Authorization: Bearer TOKEN`.",
            envvar="METALCORE_TOKEN",
            show_envvar=True,
        ),
    ] = None,
    is_open: Annotated[
        bool, typer.Option("--open", help="Listen on other addresses without a token.")
    ] = False,
    rows: Annotated[int, typer.Option(help="So many answers are written at once.", min=1)] = 8,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of a prompt with its answer; default: the model's, to 8192."),
    ] = None,
    waiting: Annotated[
        int, typer.Option(help="So many requests may wait for a row; others get 429.", min=0)
    ] = 64,
    cache: Annotated[
        str, typer.Option(help="Keys and values: auto, as the model computes; or int8.")
    ] = "auto",
    name: Annotated[
        str | None, typer.Option(help="The model's name for clients; default: the file's.")
    ] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(help="What `metalcore finetune` saved.", exists=True, file_okay=False),
    ] = None,
    tiles: Annotated[
        Path | None,
        typer.Option(help="A folder that keeps rearranged weights: the next start is quicker."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="A line for each request.")] = False,
    threads: Annotated[int | None, typer.Option(help="CPU threads.", min=1)] = None,
    device: Annotated[str, typer.Option(help="cpu or mps.")] = "cpu",
) -> None:
    """Serve a model to programs that speak OpenAI's interface.

    /v1/chat/completions and /v1/completions, streamed or whole, /v1/models, and /health. Answers
    that are asked for at the same time are computed together. Ctrl-C ends it.

    Try it: `curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d
    '{"messages": [{"role": "user", "content": "Hello"}]}'`; or give a client the address
    http://127.0.0.1:8000/v1 and any key.
    """
    with errors_are_messages():
        for package in ("starlette", "uvicorn", "transformers"):
            need(package, "serve")
        from metalcore.serve.server import Settings, run

        use_threads(threads)
        run(
            model,
            Settings(
                host=host,
                port=port,
                token=token,
                is_open=is_open,
                rows=rows,
                context=context,
                waiting=waiting,
                cache=cache,
                name=name,
                adapter=adapter,
                tiles=tiles,
                verbose=verbose,
                device=device,
            ),
        )
