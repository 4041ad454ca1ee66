# SPDX-License-Identifier: MIT
"""A training step of a 58-million-parameter Llama of transformers, plain and accelerated.

`python -m metalcore.bench.patch.training_step [--rounds N] [--threads N]` checks that the sides
have the same loss and gradients, then prints times and the memory of a step on top of weights and
optimizer state. One thread is timed by its CPU time, more by the clock.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore._measure import peak_bytes

from ..harness import Bench

# whole models are compared here, which `metalcore bench` does not do
BENCHES: tuple[Bench, ...] = ()

WIDTH, WITHIN, LAYERS, HEADS = 512, 1376, 8, 8
BATCH, TOKENS = 4, 256
VOCABULARY, LARGE_VOCABULARY = 32000, 128256


def llama(vocabulary: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=WITHIN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


@dataclass
class Side:
    """A model, its optimizer, and the seconds of its steps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    seconds: list[float] = field(default_factory=list)

    def gradients(self, tokens: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    def step(self, tokens: Tensor) -> Tensor:
        loss = self.gradients(tokens)
        self.optimizer.step()
        return loss


def plain(vocabulary: int, fused: bool | None = None) -> Side:
    model = llama(vocabulary)
    return Side(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused))


def accelerated(vocabulary: int) -> Side:
    model = llama(vocabulary)
    metalcore.accelerate(model)
    return Side(model, metalcore.MetalAdamW(model.parameters(), lr=1e-4))


SIDES: dict[str, Callable[[int], Side]] = {
    "metalcore": accelerated,
    "torch": plain,
    "torch, fused AdamW": partial(plain, fused=True),
}


def check(ours: Side, theirs: Side, tokens: Tensor) -> float:
    """The largest error of the loss and of a gradient; an AssertionError if it is not rounding."""
    losses = ours.gradients(tokens), theirs.gradients(tokens)
    grads = zip(ours.model.parameters(), theirs.model.parameters(), strict=True)
    pairs = [losses, *((a.grad, b.grad) for a, b in grads)]
    found = max(error(a, b) for a, b in pairs)  # type: ignore[arg-type]
    # a gradient of the first layer passed every layer twice, a sum of this length each
    allowed = 2 * LAYERS * tolerance("linear_cross_entropy", torch.float32, BATCH * TOKENS)
    assert found <= allowed, f"the gradients differ by {found:.1e}, allowed {allowed:.1e}"
    return found


def measure_time(rounds: int) -> None:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS))
    sides = {name: build(VOCABULARY) for name, build in SIDES.items()}
    off = check(sides["metalcore"], sides["torch"], tokens)
    print(f"largest difference of a gradient: {off:.1e}")
    for i in range(rounds + 1):
        for side in list(sides.values())[:: 1 if i % 2 else -1]:
            start = clock()
            side.step(tokens)
            # the first round creates the optimizer's state
            if i:
                side.seconds.append(clock() - start)
    ours = min(sides.pop("metalcore").seconds)
    for name, side in sides.items():
        print(f"time, against {name}: {min(side.seconds) / ours:.2f}x as fast")


def measure_memory(vocabulary: int) -> None:
    tokens = torch.randint(0, vocabulary, (BATCH, TOKENS))
    found = {}
    for name in ("metalcore", "torch, fused AdamW"):
        side = SIDES[name](vocabulary)
        side.step(tokens[:1, :8])
        side.optimizer.zero_grad()
        found[name] = peak_bytes(partial(side.step, tokens), "cpu")
        del side
    ours, theirs = found.values()
    print(
        f"memory of a step, {vocabulary} words: {ours >> 20} MiB against {theirs >> 20} MiB, "
        f"{1 - ours / theirs:.0%} less"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    measure_time(given.rounds)
    for size in (VOCABULARY, LARGE_VOCABULARY):
        measure_memory(size)
