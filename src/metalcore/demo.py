# SPDX-License-Identifier: MIT
"""`metalcore demo`: trains a small Llama-like model with and without metalcore, side by side."""

import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from metalcore import _native, _report
from metalcore._accuracy import tolerance
from metalcore._tiny_lm import MAX_TIME, Decoder, batches
from metalcore._trace import trace
from metalcore.nn import RMSNorm

_SEED = 0
_BATCH = 8
_WIDTH, _LAYERS = 256, 4
# Training amplifies rounding: a plain model whose weights are changed in the last bit is 1e-6 off
# after 30 steps and 0.4 off within 100, so losses are compared before that.
_COMPARED_STEPS = 30


def with_metalcore(model: nn.Module) -> nn.Module:
    """A copy of `model` with every torch.nn.RMSNorm replaced, weights included."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.RMSNorm:
                norm = RMSNorm(child.normalized_shape, child.eps, child.elementwise_affine)
                norm.load_state_dict(child.state_dict())
                setattr(module, name, norm.to(child.weight.device))
    return model


@dataclass
class Side:
    """One of the two models, its optimiser, and what was measured."""

    name: str
    model: nn.Module
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def gradients(self, tokens: Tensor) -> Tensor:
        """Fill in the gradients; the loss."""
        logits = self.model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
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

    @property
    def median_ms(self) -> float:
        return statistics.median(self.seconds) * 1e3


def train(sides: tuple[Side, Side], data: list[Tensor], console: Console) -> None:
    """Step both in turn, the first to go changing every step, so that noise hits both alike."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("training", total=len(data))
        # untimed, and the weights stay as they are
        for side in sides:
            side.gradients(data[0])
        for i, tokens in enumerate(data):
            for side in sides if i % 2 == 0 else sides[::-1]:
                side.timed_step(tokens)
            loss = ", ".join(f"{s.name} {s.losses[-1]:.3f}" for s in sides)
            progress.update(task, advance=1, description=f"training, loss: {loss}")


def peak_bytes(side: Side, tokens: Tensor, device: str) -> int:
    """Most memory one step holds at a time on top of weights and optimiser state."""
    side.optimizer.zero_grad()
    if device == "mps":
        # There is no counter of the peak: what the allocator took from the driver stays with it.
        torch.mps.empty_cache()
        before = torch.mps.driver_allocated_memory()
        side.step(tokens)
        return int(torch.mps.driver_allocated_memory() - before)
    with (
        _without_profiler_chatter(),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile,
    ):
        side.step(tokens)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    totals = [int(e["args"]["Total Allocated"]) for e in memory]
    # The total goes on from an earlier profile: count from before the first event.
    return max(totals) - (totals[0] - int(memory[0]["args"]["Bytes"]))


@contextmanager
def _without_profiler_chatter() -> Iterator[None]:
    """Hold back standard error, and pass on what is not a note of the profiler about itself."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            os.write(2, b"".join(line for line in file if not line.startswith(b"USDT:")))


def paths_of_step(side: Side, tokens: Tensor) -> Counter[tuple[str, str, str]]:
    """Calls by op, path and variant."""
    with trace() as t:
        side.step(tokens)
    return Counter((r.op, r.path, r.variant) for r in t.records)


def run(steps: int = 30, html: Path | None = Path("report.html"), device: str | None = None) -> int:
    """Train both models, print the comparison, and write a report.

    Args:
        steps: training steps per model.
        html: file of the report; None for no report.
        device: `cpu` or `mps`; default mps where there is one.

    Returns:
        0; 1 if the losses are not the same within the tolerance, or if an op was computed by the
        reference although there is a kernel.
    """
    if steps < 1:
        raise ValueError(f"demo: steps must be at least 1, got {steps}")
    console = Console()
    device = device or ("mps" if torch.backends.mps.is_available() else "cpu")
    data, vocabulary = batches(steps, _BATCH, MAX_TIME, device)
    torch.manual_seed(_SEED)
    model = Decoder(vocabulary, width=_WIDTH, layers=_LAYERS).to(device)
    plain, ours = Side("plain", model), Side("metalcore", with_metalcore(model))
    train((plain, ours), data, console)
    calls = paths_of_step(ours, data[-1])
    for side in (plain, ours):
        side.peak_bytes = peak_bytes(side, data[-1], device)
    result = Comparison(plain, ours, calls, device)
    result.print(console)
    if html is not None:
        html.write_text(result.html(), encoding="utf-8")
        console.print(f"wrote {html}", highlight=False)
    return 1 if result.problems else 0


@dataclass
class Comparison:
    """What the run showed, and how it is told."""

    plain: Side
    ours: Side
    calls: Counter[tuple[str, str, str]]
    device: str

    @property
    def difference(self) -> float:
        """Largest difference between the two loss curves, relative to the loss."""
        pairs = list(zip(self.plain.losses, self.ours.losses, strict=True))[: self.compared]
        return max(abs(a - b) / abs(a) for a, b in pairs)

    @property
    def compared(self) -> int:
        return min(len(self.plain.losses), _COMPARED_STEPS)

    @property
    def allowed(self) -> float:
        """What one norm may be off by, once per step."""
        return self.compared * tolerance("rms_norm", torch.float32, _WIDTH)

    @property
    def has_kernels(self) -> bool:
        return self.device != "cpu" or _native.isa is not None

    @property
    def problems(self) -> list[str]:
        found = []
        # written so that a NaN is a problem
        if not self.difference <= self.allowed:
            found.append(f"the losses differ by {self.difference:.1e}, allowed {self.allowed:.1e}")
        left = sorted({op for op, path, _ in self.calls if path == "reference"})
        if self.has_kernels and left:
            found.append(f"computed by the reference although there is a kernel: {', '.join(left)}")
        return found

    def rows(self) -> list[list[str]]:
        sides = (self.plain, self.ours)
        speed = self.plain.median_ms / self.ours.median_ms
        fastest = [min(s.seconds) * 1e3 for s in sides]
        memory = [s.peak_bytes / 2**20 for s in sides]
        losses = [s.losses[-1] for s in sides]
        return [
            ["time per step, median, ms", *(f"{s.median_ms:.1f}" for s in sides), f"{speed:.2f}x"],
            ["time per step, fastest, ms", *_shown(fastest, 1), f"{fastest[0] / fastest[1]:.2f}x"],
            ["peak memory of a step, MiB", *_shown(memory, 1), f"{memory[1] / memory[0] - 1:+.1%}"],
            ["loss, first step", *_shown([s.losses[0] for s in sides], 4), ""],
            ["loss, last step", *_shown(losses, 4), f"{losses[1] - losses[0]:+.1e}"],
            [f"largest difference to step {self.compared}", "", "", f"{self.difference:.1e}"],
        ]

    def remarks(self) -> list[str]:
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
            f"A Llama-like decoder of {weights:.1f} million weights, {_LAYERS} layers, width "
            f"{_WIDTH}, batches of {_BATCH} x {MAX_TIME} characters, float32, AdamW, "
            f"steps: {len(self.plain.losses)}, on {self.device} with {torch.get_num_threads()} CPU "
            f"threads, torch {torch.__version__}. Both start from the same weights, see the same "
            "text and take steps in turn; metalcore replaces every torch.nn.RMSNorm."
            + ("" if self.has_kernels else kernels),
            f"Peak memory is {what}, on top of weights and optimiser state. Up to step "
            f"{self.compared} the losses may differ by {self.allowed:.1e} of their value, which is "
            "what rounding in the norms may add up to; later, training amplifies any rounding.",
        ]

    def print(self, console: Console) -> None:
        table = Table("", "plain", "metalcore", "", title="training step", title_justify="left")
        for row in self.rows():
            table.add_row(*row)
        for column in table.columns[1:]:
            column.justify = "right"
        paths = Table("op", "path", "variant", "calls per step", title_justify="left")
        paths.title = "who computed metalcore's ops"
        for (op, path, variant), count in self.calls.items():
            paths.add_row(op, path, variant, str(count))
        console.print(table, paths)
        for remark in self.remarks():
            console.print(remark, highlight=False)
        for problem in self.problems:
            console.print(f"PROBLEM: {problem}", style="bold red", highlight=False)

    def html(self) -> str:
        sides = (self.plain, self.ours)
        losses = {s.name: [(i + 1.0, x) for i, x in enumerate(s.losses)] for s in sides}
        times = {s.name: [(i + 1.0, x * 1e3) for i, x in enumerate(s.seconds)] for s in sides}
        calls: list[list[_report.Cell]] = [[*key, n] for key, n in self.calls.items()]
        problems = "; ".join(self.problems)
        return _report.page(
            "metalcore demo: a small model trained with and without metalcore",
            [*self.remarks(), *([f"PROBLEM: {problems}."] if problems else [])],
            [
                _report.Lines("Loss", "step", "cross entropy, nats per character", losses),
                _report.Lines("Time per step", "step", "milliseconds", times, from_zero=True),
                _report.Table(
                    "Side by side", ["", "plain", "metalcore", "difference"], self.rows(), (1, 2, 3)
                ),
                _report.Table(
                    "Who computed metalcore's ops",
                    ["op", "path", "variant", "calls per step"],
                    calls,
                ),
            ],
        )


def _shown(values: list[float], decimals: int) -> list[str]:
    return [f"{value:.{decimals}f}" for value in values]
