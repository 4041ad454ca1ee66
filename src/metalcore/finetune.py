# SPDX-License-Identifier: MIT
"""`metalcore finetune`: low-rank adapters on a packed model (QLoRA), with a report."""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from metalcore import _report
from metalcore._check import expect
from metalcore._optional import need
from metalcore.chat import memory, quiet
from metalcore.gguf.load import load_gguf
from metalcore.optim import MetalAdamW
from metalcore.patch.accelerate import accelerate

_IGNORED = -100
_FORMS = '{"text"}, {"prompt", "completion"} or {"messages"}'


@dataclass
class Training:
    """How to train."""

    steps: int = 100
    batch_size: int = 4
    learning_rate: float = 2e-4
    rank: int = 8
    alpha: int = 16
    length: int = 512
    seed: int = 0

    def check(self) -> None:
        for name in ("steps", "batch_size", "learning_rate", "rank", "alpha", "length"):
            value = getattr(self, name)
            expect(value > 0, "finetune", f"{name} must be positive, got {value}")


@dataclass
class Result:
    """What came of it."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    examples: int = 0
    trained: int = 0
    total: int = 0


@dataclass
class Example:
    """Tokens, and which of them are to be learned."""

    tokens: list[int]
    learned: list[bool]


def read_examples(path: Path, tokenizer: Any, length: int) -> list[Example]:
    """The lines of a JSONL file as tokens; errors name the line."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            example = _example(json.loads(line), tokenizer)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"finetune: {path.name}:{number} must be a JSON object with {_FORMS}: {error!r}"
            ) from error
        found.append(Example(example.tokens[:length], example.learned[:length]))
    learned = [example for example in found if any(example.learned[1:])]
    expect(bool(learned), "finetune", f"{path.name} has no examples: one {_FORMS} per line")
    return learned


def _example(says: Any, tokenizer: Any) -> Example:
    if "messages" in says:
        return _conversation(says["messages"], tokenizer)
    prompt = says.get("prompt", "")
    answer = says["completion"] if "prompt" in says else says["text"]
    asked = tokenizer(prompt).input_ids if prompt else _start(tokenizer)
    said = tokenizer(answer, add_special_tokens=False).input_ids + _end(tokenizer)
    return Example(asked + said, [False] * len(asked) + [True] * len(said))


def _conversation(messages: list[dict[str, str]], tokenizer: Any) -> Example:
    """What the assistant says is learned."""
    expect(
        tokenizer.chat_template is not None,
        "finetune",
        'the model has no chat template for {"messages"}; use {"prompt", "completion"}',
    )
    tokens: list[int] = []
    learned: list[bool] = []
    for i, message in enumerate(messages):
        text = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
        now = tokenizer(text, add_special_tokens=False).input_ids
        learned += [message["role"] == "assistant"] * (len(now) - len(tokens))
        tokens = now
    return Example(tokens, learned[: len(tokens)])


def _start(tokenizer: Any) -> list[int]:
    return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]


def _end(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def batches(
    examples: list[Example], training: Training, padding: int
) -> Iterator[dict[str, Tensor]]:
    """As many batches as there are steps; each example once before any comes again."""
    order = random.Random(training.seed)
    waiting: list[Example] = []
    for _ in range(training.steps):
        while len(waiting) < training.batch_size:
            again = list(examples)
            order.shuffle(again)
            waiting += again
        chosen, waiting = waiting[: training.batch_size], waiting[training.batch_size :]
        longest = max(len(example.tokens) for example in chosen)
        ids = torch.full((len(chosen), longest), padding)
        labels = torch.full_like(ids, _IGNORED)
        mask = torch.zeros_like(ids)
        for row, example in enumerate(chosen):
            n = len(example.tokens)
            ids[row, :n] = torch.tensor(example.tokens)
            mask[row, :n] = 1
            labels[row, :n] = torch.where(
                torch.tensor(example.learned), torch.tensor(example.tokens), _IGNORED
            )
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


def finetune(
    path: Path,
    data: Path,
    out: Path,
    training: Training,
    *,
    html: Path | None = None,
    device: str = "cpu",
    console: Console | None = None,
) -> Result:
    """Train adapters on the packed weights of a GGUF file and save them with peft.

    Args:
        path: the GGUF file; it stays as it is.
        data: JSONL, a line per example: `{"text"}`, `{"prompt", "completion"}` or `{"messages"}`.
        out: the folder of the adapter.
        training: how.
        html: a report with the loss, or none.
        device: where.
        console: where progress is shown.

    Returns:
        Losses and times of all steps.
    """
    training.check()
    quiet()
    peft = need("peft", "finetune")
    console = console or Console(stderr=True)
    torch.manual_seed(training.seed)
    base = load_gguf(path, device=device)
    tokenizer = base.tokenizer
    expect(tokenizer is not None, "finetune", f"{path.name} has no tokenizer")
    examples = read_examples(data, tokenizer, training.length)
    adapters = peft.LoraConfig(
        r=training.rank,
        lora_alpha=training.alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base, adapters)
    accelerate(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    result = Result(
        examples=len(examples),
        trained=sum(p.numel() for p in trained),
        total=path.stat().st_size,
    )
    _train(model, trained, examples, training, tokenizer.pad_token_id or 0, result, console)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    if html is not None:
        html.write_text(report(path, data, training, result), encoding="utf-8")
    return result


def _train(
    model: Any,
    trained: list[Tensor],
    examples: list[Example],
    training: Training,
    padding: int,
    result: Result,
    console: Console,
) -> None:
    optimizer = MetalAdamW(trained, lr=training.learning_rate, weight_decay=0.0)
    # the first tenth gets up to the rate, the rest comes down from it
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, training.learning_rate, total_steps=training.steps + 1, pct_start=0.1
    )
    model.train()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("training", total=training.steps)
        for batch in batches(examples, training, padding):
            start = time.perf_counter()
            loss = model(**{name: value.to(model.device) for name, value in batch.items()}).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            result.losses.append(loss.item())
            result.seconds.append(time.perf_counter() - start)
            progress.update(task, advance=1, description=f"training, loss {loss.item():.3f}")
    model.eval()


def report(path: Path, data: Path, training: Training, result: Result) -> str:
    """The page of a training."""
    curve = [(i + 1.0, loss) for i, loss in enumerate(result.losses)]
    times = [(i + 1.0, seconds * 1e3) for i, seconds in enumerate(result.seconds)]
    rows = [
        ["model", f"{path.name}, {result.total / 1e6:.1f} MB, packed and frozen"],
        ["data", f"{data.name}, {result.examples} examples"],
        ["adapter", f"rank {training.rank}, {result.trained} numbers"],
        ["steps", f"{training.steps} of {training.batch_size} examples"],
        ["learning rate", f"{training.learning_rate:g}"],
        ["time", f"{sum(result.seconds):.1f} s"],
        ["memory", memory()],
    ]
    first, last = result.losses[0], result.losses[-1]
    return _report.page(
        f"Fine-tuning {path.name}",
        [f"The loss went from {first:.3f} to {last:.3f} in {training.steps} steps."],
        [
            _report.Lines("Loss", "step", "nats per token", {"loss": curve}),
            _report.Lines("Time per step", "step", "milliseconds", {"step": times}, from_zero=True),
            _report.Table("How", ["", ""], rows),
        ],
    )
