# SPDX-License-Identifier: MIT
"""Calls of kernels that nobody chose: op, dtype, sizes, values and layout at random, each against
what the op means in float64.

    python -m tests.fuzz --cases 1000000 --seconds 3600 --family linalg --seed 7

A case is known by the seed and its number, so that one that fails can be repeated alone. They run
in a process of their own, whose end would be a failure too.
"""

import math
import multiprocessing
import random
import sys
import time
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from metalcore import _native
from metalcore._op import Example, Op
from metalcore._trace import tensors
from metalcore._where import map_tensors
from tests.backends import FLOATS
from tests.raw_calls import flaw
from tests.strategies import Pick, laid_out

# Around the widths of registers and blocks; small ones more often.
SIZES = (*range(10), *range(1, 6), 15, 16, 17, 31, 33, 63, 65, 70)
# A tensor has no more values: a case is to take less than a millisecond.
MOST_VALUES = 2000
# What values are multiplied by, where no function is flat far from 0.
SCALES = (1.0, 1.0, 1.0, 1e-3, 30.0)
SCALED = ("linalg", "precise")
SEEDS = range(2**16)


def families() -> dict[str, list[str]]:
    """The names of all ops, by family."""
    found: dict[str, list[str]] = {}
    for name, op in sorted(Op.all.items()):
        found.setdefault(op.story.split("/")[0], []).append(name)
    return found


class Call(NamedTuple):
    """Arguments of an op, and the number of values that its longest sum may add up."""

    op: Op
    args: list[Any]
    reduces_over: int

    def __str__(self) -> str:
        shown = [map_tensors(_shown, a) for a in self.args]  # type: ignore[arg-type]
        return f"{self.op.name} of {shown}"

    def flaw(self) -> str | None:
        return flaw(self.op, "", self.args, self.reduces_over)


def draw_call(pick: Pick, names: Sequence[str]) -> Call:
    """An example of one of these ops, with other sizes, values and strides."""
    op = Op.all[pick(names)]
    example, kinds = _example(op.name, pick(range(len(op.samples))), pick(FLOATS))
    sizes = _sizes(pick, list(kinds.values()))
    scale = pick(SCALES) if op.story.startswith(SCALED) else 1.0
    # torch.manual_seed looks for every other device first
    torch.default_generator.manual_seed(pick(SEEDS))

    def vary(x: Tensor) -> Tensor:
        kind = kinds[id(x)]
        if not x.dim():
            return x
        shape = [sizes.get(n, n) for n in x.shape]
        return laid_out(pick, x if kind.is_fixed else kind.values(pick, shape, scale))

    args = [map_tensors(vary, a) for a in example.args]
    return Call(op, args, max([example.reduces_over, *sizes.values()]) ** 2)


class Kind(NamedTuple):
    """What a tensor of an example holds: a limit at random would be as large as what it divides."""

    x: Tensor
    is_fixed: bool
    constant: float | None
    is_positive: bool
    most: int

    @classmethod
    def of(cls, x: Tensor, is_fixed: bool) -> "Kind":
        if not x.is_floating_point():
            return cls(x, is_fixed, None, True, int(x.max()) + 1 if x.numel() else 1)
        first = x.flatten()[0].item() if x.numel() > 1 else None
        same = first is not None and bool((x == first).all())
        return cls(x, is_fixed, first if same else None, bool((x >= 0).all()), 0)

    def values(self, pick: Pick, shape: list[int], scale: float) -> Tensor:
        """Values as in the example, none negative if none is; of square matrices, positive definite
        ones. Bytes are those of the example, in rows of it."""
        x = self.x
        if x.dtype == torch.uint8:
            rows = torch.randint(len(x), (shape[0],)) if len(x) else torch.zeros(0, dtype=int)
            return x[rows]
        if not x.is_floating_point():
            if list(x.shape) == shape and pick((True, False)):
                return x
            return torch.randint(self.most, shape, dtype=x.dtype)
        if self.constant is not None:
            return x.new_full(shape, self.constant)
        y = torch.randn(shape)
        if self.is_positive:
            y = y.abs()
        if len(shape) >= 2 and shape[-1] == shape[-2]:
            y = y @ y.mT / max(1, shape[-1]) + torch.eye(shape[-1])
        # without -0: whether its sign counts, as in qr, is not said
        return (y * scale).to(x.dtype) + 0


def _sizes(pick: Pick, kinds: Sequence[Kind]) -> dict[int, int]:
    """Other sizes for those of an example: for all, or for one, since some go together. Bytes are
    blocks, whose length stays."""
    free = {n for k in kinds for n in k.x.shape}
    free -= {n for k in kinds if k.x.dtype == torch.uint8 for n in k.x.shape[1:]}
    free -= {n for k in kinds if k.is_fixed for n in k.x.shape}
    if not free:
        return {}
    ordered = sorted(free)
    chosen = ordered if pick((True, False)) else [pick(ordered)]
    sizes = {n: pick(SIZES) for n in chosen}

    def most() -> int:
        return max(math.prod(sizes.get(n, n) for n in k.x.shape) for k in kinds)

    while most() > MOST_VALUES and max(sizes.values()) > 1:
        sizes[max(sizes, key=lambda n: sizes[n])] //= 2
    return sizes


@cache
def _example(op: str, sample: int, dtype: torch.dtype) -> tuple[Example, dict[int, Kind]]:
    """An example, and its tensors by identity. Weights that it has twice, as tiles too, stay."""
    torch.manual_seed(0)
    example = Op.all[op].samples[sample](dtype)
    found = list(tensors(example.args))
    is_twice = sum(x.dtype == torch.uint8 for x in found) > 1
    return example, {id(x): Kind.of(x, is_twice and x is not found[0]) for x in found}


def _shown(x: Tensor) -> Any:
    return (str(x.dtype), list(x.shape), x.stride())


def case(seed: int, number: int, names: Sequence[str]) -> Call:
    return draw_call(random.Random(f"{seed} {number}").choice, names)


def _work(seed: int, numbers: range, chosen: dict[str, list[str]], state: Any, found: Any) -> None:
    """Tries ops in turn. `state`: the number of the case, then how many were tried and how many
    refused, by family."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = [(name, family) for family, ops in enumerate(chosen.values()) for name in ops]
    for number in numbers:
        state[0] = number
        name, family = names[number % len(names)]
        call = case(seed, number, [name])
        flawed = call.flaw()
        state[1 + 2 * family] += 1
        state[2 + 2 * family] += flawed is None
        if flawed:
            found.send(f"{call}: {flawed}")
            return


def main(
    cases: Annotated[int, typer.Option(help="How many.")] = 1_000_000,
    seconds: Annotated[float, typer.Option(help="For no longer.")] = math.inf,
    family: Annotated[str | None, typer.Option(help="Only ops of this one.")] = None,
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    seed: int = 0,
    first: Annotated[int, typer.Option(help="Number of the first case.")] = 0,
) -> None:
    """Try kernels on what nobody chose; exit code 1 at the first wrong answer."""
    chosen = {
        name: [o for o in ops if op in (None, o)]
        for name, ops in families().items()
        if family in (None, name) and (op is None or op in ops)
    }
    if not chosen:
        raise typer.BadParameter(f"no such ops; families are {', '.join(families())}")
    # nothing was computed yet, so a fork has no threads to miss
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    state = context.Array("q", 1 + 2 * len(chosen), lock=False)
    receives, sends = context.Pipe(duplex=False)
    task = context.Process(
        target=_work, args=(seed, range(first, first + cases), chosen, state, sends), daemon=True
    )
    console, end = Console(soft_wrap=True), time.monotonic() + seconds
    columns = (TextColumn(str(_native.isa)), BarColumn(), MofNCompleteColumn())
    task.start()
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        shown = progress.add_task("", total=cases)
        while task.is_alive() and time.monotonic() < end:
            task.join(0.5)
            progress.update(shown, completed=sum(state[1::2]))
    is_ended = not task.is_alive()
    task.kill()
    task.join()
    for i, name in enumerate(chosen):
        tried, refused = state[1 + 2 * i], state[2 + 2 * i]
        console.print(f"{name}: {tried} cases, {refused} of them refused", highlight=False)
    again = " ".join(f"--{k} {v}" for k, v in (("family", family), ("op", op)) if v)
    if receives.poll():
        problem = receives.recv()
    elif is_ended and task.exitcode:
        problem = f"the process ended with {task.exitcode}"
    else:
        return
    console.print(f"[bold red]wrong:[/] {problem}", markup=True, highlight=False)
    print(
        f"again: METALCORE_CPU={_native.isa} python -m tests.fuzz --seed {seed} "
        f"--first {state[0]} --cases 1 {again}"
    )
    raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
