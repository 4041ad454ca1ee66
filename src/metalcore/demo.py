# SPDX-License-Identifier: MIT
"""`metalcore demo`: trains and runs a small model as it is and accelerated, side by side."""

import copy
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

from metalcore import _native, _report
from metalcore._accuracy import tolerance
from metalcore._check import expect, expect_one_of
from metalcore._demo_models import KINDS, Kind, tokens_per_second
from metalcore._measure import operator_seconds, peak_bytes
from metalcore._simulate import simulate
from metalcore._text import batches
from metalcore._trace import trace
from metalcore.metal.run import has_metal_kernels
from metalcore.optim import MetalAdamW
from metalcore.patch.accelerate import Summary, accelerate

_BATCH, _TIME = 8, 128
_TINY_STEPS, _TINY_BATCH, _TINY_TIME = 4, 2, 16
_PROMPT, _NEW_TOKENS = 16, 32
# operators of either side that the report shows
_OPERATORS = 8
# Training amplifies rounding: a plain model whose weights are changed in the last bit is 1e-6 off
# after 30 steps and 0.4 off within 100, so losses are compared before that.
_COMPARED_STEPS = 30


@dataclass
class Side:
    """One of the two models, its optimiser, and what was measured."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    operators: dict[str, float] = field(default_factory=dict)
    written: list[int] = field(default_factory=list)
    seconds_per_token: float = 0.0
    speeds: list[tuple[float, float]] = field(default_factory=list)

    @classmethod
    def plain(cls, model: nn.Module) -> "Side":
        return cls("plain", model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    @classmethod
    def accelerated(cls, model: nn.Module) -> tuple["Side", Summary]:
        """The same weights, accelerated."""
        model = copy.deepcopy(model)
        summary = accelerate(model)
        return cls("metalcore", model, MetalAdamW(model.parameters(), lr=1e-3)), summary

    def gradients(self, tokens: Tensor) -> Tensor:
        """Fill in the gradients; the loss."""
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        self.optimizer.zero_grad()
        loss.backward()
        return loss.detach()

    def step(self, tokens: Tensor) -> Tensor:
        loss = self.gradients(tokens)
        self.optimizer.step()
        return loss

    def timed_step(self, tokens: Tensor) -> None:
        start = time.perf_counter()
        # item() waits for the GPU
        self.losses.append(self.step(tokens).item())
        self.seconds.append(time.perf_counter() - start)

    def write(self, prompt: Tensor) -> None:
        """Go on with `prompt`, always by the likeliest token."""
        model: Any = self.model.eval()
        start = time.perf_counter()
        tokens = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=_NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        self.written = tokens[0].tolist()
        self.seconds_per_token = (time.perf_counter() - start) / _NEW_TOKENS
        self.model.train()

    def measure(self, tokens: Tensor, device: str) -> None:
        """Memory and time per operator of one step."""
        self.optimizer.zero_grad()
        self.peak_bytes = peak_bytes(lambda: self.step(tokens), device)
        self.operators = operator_seconds(lambda: self.step(tokens))

    @property
    def median_ms(self) -> float:
        return statistics.median(self.seconds) * 1e3


def train(sides: tuple[Side, Side], data: list[Tensor], progress: Progress) -> None:
    """Step both in turn, the first to go changing every step, so that noise hits both alike."""
    task = progress.add_task("training", total=len(data))
    # untimed, and the weights stay as they are
    for side in sides:
        side.gradients(data[0])
    for i, tokens in enumerate(data):
        for side in sides if i % 2 == 0 else sides[::-1]:
            side.timed_step(tokens)
        loss = ", ".join(f"{s.name} {s.losses[-1]:.3f}" for s in sides)
        progress.update(task, advance=1, description=f"training, loss: {loss}")


@dataclass
class Simulated:
    """A tiny model trained plain, and by the Metal kernels in the simulator."""

    plain: list[float]
    metal: list[float]
    kernels: Counter[str]

    @property
    def difference(self) -> float:
        return _difference(self.plain, self.metal)


def train_in_simulator(kind: Kind, progress: Progress) -> Simulated:
    data, vocabulary = batches(_TINY_STEPS, _TINY_BATCH, _TINY_TIME, "cpu")
    plain = Side.plain(kind.build(vocabulary, kind.tiny))
    ours, _ = Side.accelerated(plain.model)
    task = progress.add_task("training a tiny one in the simulator", total=len(data))
    kernels: Counter[str] = Counter()
    for tokens in data:
        plain.timed_step(tokens)
        with simulate(), trace() as t:
            ours.timed_step(tokens)
        kernels.update(r.path for r in t.records)
        progress.update(task, advance=1)
    return Simulated(plain.losses, ours.losses, kernels)


def run(
    steps: int = 30,
    html: Path | None = Path("report.html"),
    device: str | None = None,
    model: str = "llama",
) -> int:
    """Train both models, let them write, print the comparison, and write a report.

    Args:
        steps: training steps per model.
        html: file of the report; None for no report.
        device: `cpu` or `mps`; default mps where there is one.
        model: `llama` or `xlstm`.

    Returns:
        0; 1 if losses or texts are not the same within the tolerance, or if an op was computed by
        the reference although there is a kernel.
    """
    expect(steps >= 1, "demo", f"steps must be at least 1, got {steps}")
    expect_one_of("demo", "model", model, tuple(KINDS))
    kind = KINDS[model]
    console = Console()
    device = device or ("mps" if has_metal_kernels() else "cpu")
    data, _ = batches(steps, _BATCH, _TIME, device)
    plain = Side.plain(kind.build(kind.vocabulary, kind.sizes).to(device))
    ours, summary = Side.accelerated(plain.model)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        train((plain, ours), data, progress)
        simulated = train_in_simulator(kind, progress)
    with trace() as t:
        ours.step(data[-1])
    for side in (plain, ours):
        side.measure(data[-1], device)
    # the texts are of the same weights, so that they must be the same
    plain.model.load_state_dict(ours.model.state_dict())
    for side in (plain, ours):
        side.write(data[0][:1, :_PROMPT])
        if kind.contexts:
            side.speeds = tokens_per_second(side.model, kind.contexts, device)
    result = Comparison(kind, plain, ours, summary, t, simulated, device)
    result.print(console)
    if html is not None:
        html.write_text(result.html(), encoding="utf-8")
        console.print(f"wrote {html}", highlight=False)
    return 1 if result.problems else 0


@dataclass
class Comparison:
    """What the run showed, and how it is told."""

    kind: Kind
    plain: Side
    ours: Side
    summary: Summary
    trace: trace
    simulated: Simulated
    device: str

    @property
    def difference(self) -> float:
        """Largest difference between the two loss curves, relative to the loss."""
        return _difference(self.plain.losses[: self.compared], self.ours.losses[: self.compared])

    @property
    def compared(self) -> int:
        return min(len(self.plain.losses), _COMPARED_STEPS)

    @property
    def has_kernels(self) -> bool:
        return self.device != "cpu" or _native.isa is not None

    @property
    def problems(self) -> list[str]:
        found = []
        losses = (
            ("", self.difference, self.compared),
            (" in the simulator", self.simulated.difference, _TINY_STEPS),
        )
        for where, difference, steps in losses:
            # written so that a NaN is a problem
            allowed = _allowed(self.kind, steps)
            if not difference <= allowed:
                found.append(f"the losses{where} differ by {difference:.1e}, allowed {allowed:.1e}")
        if self.plain.written != self.ours.written:
            found.append("the two models write different texts")
        left = sorted({r.op for r in self.trace.records if r.path == "reference"})
        if self.has_kernels and left:
            found.append(f"computed by the reference although there is a kernel: {', '.join(left)}")
        return found

    def rows(self) -> list[list[str]]:
        sides = (self.plain, self.ours)
        steps = [s.median_ms for s in sides]
        fastest = [min(s.seconds) * 1e3 for s in sides]
        memory = [s.peak_bytes / 2**20 for s in sides]
        tokens = [s.seconds_per_token * 1e3 for s in sides]
        losses = [s.losses[-1] for s in sides]
        same = "the same" if self.plain.written == self.ours.written else "DIFFERENT"
        return [
            ["time per step, median, ms", *_shown(steps, 1), f"{steps[0] / steps[1]:.2f}x"],
            ["time per step, fastest, ms", *_shown(fastest, 1), f"{fastest[0] / fastest[1]:.2f}x"],
            ["peak memory of a step, MiB", *_shown(memory, 1), f"{memory[1] / memory[0] - 1:+.1%}"],
            ["loss, first step", *_shown([s.losses[0] for s in sides], 4), ""],
            ["loss, last step", *_shown(losses, 4), f"{losses[1] - losses[0]:+.1e}"],
            [f"largest difference to step {self.compared}", "", "", f"{self.difference:.1e}"],
            ["time per token written, ms", *_shown(tokens, 1), f"{tokens[0] / tokens[1]:.2f}x"],
            [f"{_NEW_TOKENS} tokens written", "", "", same],
            *(
                [f"tokens per second after {n:.0f}", *_shown([a, b], 1), f"{b / a:.2f}x"]
                for (n, a), (_, b) in zip(self.plain.speeds, self.ours.speeds, strict=True)
            ),
        ]

    def operators(self) -> _report.Bars:
        """The operators that take longest on either side."""
        sides = (self.plain, self.ours)
        longest = [name for side in sides for name in list(side.operators)[:_OPERATORS]]
        names = sorted(set(longest), key=lambda n: -max(s.operators.get(n, 0.0) for s in sides))
        return _report.Bars(
            "Time per operator, one step",
            "ms",
            [name.split("::")[-1] for name in names],
            {
                s.name: [s.operators[n] * 1e3 if n in s.operators else None for n in names]
                for s in sides
            },
        )

    def speeds(self) -> list[_report.Lines]:
        """Tokens per second over the length of the context, where it was measured."""
        if not self.kind.contexts:
            return []
        names = {float(at): f"{n / 1024:.3g}k" for at, n in enumerate(self.kind.contexts)}
        series = {
            s.name: [(float(at), y) for at, (_, y) in enumerate(s.speeds)]
            for s in (self.plain, self.ours)
        }
        labels = ("Writing step by step", "tokens before", "tokens per second")
        return [_report.Lines(*labels, series, from_zero=True, x_names=names)]

    def kernels(self) -> list[list[str]]:
        return [[path, str(count)] for path, count in sorted(self.simulated.kernels.items())]

    def headline(self) -> str:
        """What a reader wants to know first."""
        faster = self.plain.median_ms / self.ours.median_ms
        memory = self.ours.peak_bytes / self.plain.peak_bytes
        return (
            f"With metalcore a training step is {faster:.2f} times as fast and takes "
            f"{memory:.0%} of the memory. Losses and written text are the same."
        )

    def remarks(self) -> list[str]:
        allowed = _allowed(self.kind, self.compared)
        weights = sum(p.numel() for p in self.plain.model.parameters()) / 1e6
        what = (
            "what the Metal driver gave out during one step"
            if self.device == "mps"
            else "the most that tensors held at a time during one step, scratch space included"
        )
        kernels = (
            f" There is no compiled part here ({_native.problem}), so metalcore's ops ran as "
            "the reference, in plain torch: the times say nothing about its kernels."
        )
        return [
            f"transformers' {self.kind.name} with {weights:.1f} million random weights, "
            f"{_sizes(self.kind.sizes)}, vocabulary {self.kind.vocabulary}, "
            f"batches of {_BATCH} x {_TIME + 1} tokens, float32, "
            f"steps: {len(self.plain.losses)}, on {self.device} with {torch.get_num_threads()} CPU "
            f"threads, torch {torch.__version__}. Plain is the model with torch.optim.AdamW; "
            "metalcore is a copy after metalcore.accelerate(model), with MetalAdamW. Both see the "
            "same text and take steps in turn." + ("" if self.has_kernels else kernels),
            f"Peak memory is {what}, on top of weights and optimiser state. Up to step "
            f"{self.compared} the losses may differ by {allowed:.1e} of their value, "
            "which is what rounding may add up to; later, training amplifies any rounding.",
            f"In the simulator, a tiny {self.kind.name} ({_sizes(self.kind.tiny)}) took "
            f"{_TINY_STEPS} steps with metalcore's Metal kernels, checked for races, bounds and "
            "uninitialised memory: the losses differ from plain torch by "
            f"{self.simulated.difference:.1e}. The simulator says nothing about the time on a GPU.",
        ]

    def print(self, console: Console) -> None:
        table = Table("", "plain", "metalcore", "", title="training and writing")
        for row in self.rows():
            table.add_row(*row)
        for column in table.columns[1:]:
            column.justify = "right"
        console.print(self.summary, table)
        console.print("one step of metalcore's ops:", self.trace.summary(), highlight=False)
        for remark in self.remarks():
            console.print(remark, highlight=False)
        if not self.problems:
            console.print(self.headline(), style="bold", highlight=False)
        for problem in self.problems:
            console.print(f"PROBLEM: {problem}", style="bold red", highlight=False)

    def html(self) -> str:
        sides = (self.plain, self.ours)
        losses = {s.name: [(i + 1.0, x) for i, x in enumerate(s.losses)] for s in sides}
        times = {s.name: [(i + 1.0, x * 1e3) for i, x in enumerate(s.seconds)] for s in sides}
        tiny = {
            name: [(i + 1.0, x) for i, x in enumerate(values)]
            for name, values in (
                ("plain torch", self.simulated.plain),
                ("Metal kernels, simulated", self.simulated.metal),
            )
        }
        problems, name, axes = "; ".join(self.problems), self.kind.name, ("step", "nats per token")
        columns = ["", "plain", "metalcore", "difference"]
        return _report.page(
            f"metalcore demo: a small {name}, as it is and accelerated",
            [f"PROBLEM: {problems}." if problems else self.headline(), *self.remarks()],
            [
                _report.Lines("Loss", "step", "cross entropy, nats per token", losses),
                _report.Lines("Time per step", "step", "milliseconds", times, from_zero=True),
                self.operators(),
                _report.Lines(f"Loss of a tiny {name}, by the Metal kernels", *axes, tiny),
                *self.speeds(),
                _report.Table("Side by side", columns, self.rows(), (1, 2, 3)),
                _report.Table(
                    "What metalcore.accelerate did",
                    ["layer", "class", "count", "computed by", "left alone because"],
                    [[r.layer, r.cls, r.count, r.by, r.left_alone] for r in self.summary.rows],
                ),
                _report.Table("Metal kernels that ran", ["kernel", "calls"], self.kernels(), (1,)),
            ],
        )


def _difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


def _allowed(kind: Kind, steps: int) -> float:
    """What one norm may be off by, once per step."""
    return steps * tolerance("rms_norm", torch.float32, kind.sizes["hidden_size"])


def _sizes(model: dict[str, int]) -> str:
    return f"{model['num_hidden_layers']} layers of width {model['hidden_size']}"


def _shown(values: list[float], decimals: int) -> list[str]:
    return [f"{value:.{decimals}f}" for value in values]
