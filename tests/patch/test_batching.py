# SPDX-License-Identifier: MIT
"""Continuous batching: the text of each prompt alone, by our attention, and all as it was after."""

from typing import Any

import pytest
import torch
import transformers

import metalcore
from tests.patch.test_attention import MODELS

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [20, 21] * 5]
CONFIG = transformers.GenerationConfig(
    max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0
)


def texts(model: Any) -> list[list[int]]:
    small = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    found = model.generate_batch(
        PROMPTS, generation_config=CONFIG, continuous_batching_config=small, warmup=False
    )
    return [found[name].generated_tokens for name in sorted(found)]


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss"])
@pytest.mark.parametrize("accelerated", [True, False])
def test_text_of_a_batch(name: str, accelerated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name]().eval()
    truth = []
    for prompt in PROMPTS:
        tokens = model.generate(torch.tensor([prompt]), generation_config=CONFIG)
        truth.append(tokens[0, len(prompt) :].tolist())
    summary = metalcore.accelerate(model) if accelerated else None
    before = model.config._attn_implementation
    known = dict(transformers.AttentionInterface._global_mapping)
    calls: list[str] = []
    from metalcore.patch import batching

    for op in ("attention", "paged_attention"):
        original = getattr(batching, op)

        def counted(*args: Any, _op: str = op, _original: Any = original, **named: Any) -> Any:
            calls.append(_op)
            return _original(*args, **named)

        monkeypatch.setattr(batching, op, counted)
    with metalcore.continuous_batching(model):
        assert texts(model) == truth
    # transformers generates in a thread of its own, which no trace sees
    assert "attention" in calls
    assert ("paged_attention" in calls) is (name != "Mistral")
    assert model.config._attn_implementation == before
    assert dict(transformers.AttentionInterface._global_mapping) == known
    if summary:
        summary.undo()
