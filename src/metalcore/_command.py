# SPDX-License-Identifier: MIT
"""What the commands of `metalcore` have in common."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape


def use_threads(count: int | None) -> None:
    """Let torch compute with so many threads, if a number is given."""
    if count is not None:
        import torch

        torch.set_num_threads(count)


@contextmanager
def errors_are_messages() -> Iterator[None]:
    """What is wrong with a file or an option is said in a line, without a stack."""
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from error
