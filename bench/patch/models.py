# SPDX-License-Identifier: MIT
"""Small language models of transformers with and without `enable_pytorch_overrides()`.

`python -m metalcore.bench.patch.models [--rounds N] [--threads N] [FAMILY ...]` checks that the
loss stays the same, then times a training step and the forward pass of one token. A round is a
block of calls without overrides, one with them and one without again; printed is the median over
the rounds, and next to it what the two blocks without overrides differ by. One thread is timed by
its CPU time, more by the clock.
"""

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import metalcore
from metalcore._accuracy import error, tolerance

from ..harness import Bench

# whole models are compared here, which `metalcore bench` does not do
BENCHES: tuple[Bench, ...] = ()

# transformers' names, and what a small configuration of the family needs besides
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {},
    "qwen3": {"head_dim": 64},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 192},
    "gemma": {"head_dim": 64},
    "gemma2": {"head_dim": 64},
    "gemma3_text": {"head_dim": 64},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "smollm3": {},
    "cohere": {},
    "gpt_neox": {},
    "glm4": {"head_dim": 64},
}
WIDTH, WITHIN, LAYERS, HEADS, VOCABULARY = 256, 512, 2, 4, 2000
BATCH, TOKENS = 2, 128
BLOCK_SECONDS, WARM_UP = 0.25, 3


def build(family: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=WITHIN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=TOKENS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **FAMILIES[family],
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def training_step(model: nn.Module, tokens: Tensor) -> Tensor:
    model.zero_grad()
    loss: Tensor = model(tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


@torch.no_grad()
def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens[:1, :1]).logits
    return logits


def seconds(call: Callable[[], Tensor], overridden: bool) -> float:
    """The fastest of a block of calls; the first ones fill Python's and the machine's caches."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    taken = []
    if overridden:
        metalcore.enable_pytorch_overrides()
    for _ in range(WARM_UP):
        call()
    end = time.perf_counter() + BLOCK_SECONDS
    while time.perf_counter() < end:
        start = clock()
        call()
        taken.append(clock() - start)
    metalcore.disable_pytorch_overrides()
    return min(taken)


def compare(call: Callable[[], Tensor], rounds: int) -> str:
    plain = call()
    with metalcore.overrides():
        off = error(call(), plain)
    allowed = 2 * LAYERS * tolerance("cross_entropy", torch.float32, VOCABULARY)
    assert off <= allowed, f"the results differ by {off:.1e}, allowed {allowed:.1e}"
    ratios, controls = [], []
    for _ in range(rounds):
        before, ours, after = (seconds(call, on) for on in (False, True, False))
        ratios.append((before + after) / 2 / ours)
        controls.append(before / after)
    return f"{median(ratios):.3f} ({median(controls):.3f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    gc.disable()
    text = torch.randint(3, VOCABULARY, (BATCH, TOKENS))
    print("family        training step   one token   (in brackets: no overrides twice)")
    for name in given.families:
        model = build(name)
        step = compare(partial(training_step, model, text), given.rounds)
        token = compare(partial(next_token, model, text), given.rounds)
        print(f"{name:12}  {step}   {token}", flush=True)
