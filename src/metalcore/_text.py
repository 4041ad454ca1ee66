# SPDX-License-Identifier: MIT
"""Text for small language models to learn."""

import random

import torch
from torch import Tensor


def text(characters: int, seed: int) -> str:
    """Sentences of a small grammar: subject, verb and object agree in number, so there is
    something to learn beyond the letters."""
    draw = random.Random(seed)
    nouns, verbs = (
        ("kernel", "tensor", "matrix", "vector", "tile"),
        ("read", "write", "sum", "scale"),
    )
    sentences, length = [], 0
    while length < characters:
        one = draw.random() < 0.5
        subject, target = draw.sample(nouns, 2)
        verb, count = draw.choice(verbs), draw.choice(("two", "three", "four"))
        subject = f"one {subject} {verb}s" if one else f"{count} {subject}s {verb}"
        sentences.append(f"{subject} {'a' if one else 'many'} {target}{'' if one else 's'}. ")
        length += len(sentences[-1])
    return "".join(sentences)[:characters]


def batches(steps: int, batch: int, time: int, device: str) -> tuple[list[Tensor], int]:
    """Per step the tokens [batch, time + 1], and the size of the vocabulary."""
    written = text(steps * batch * (time + 1), seed=0)
    letters = sorted(set(written))
    tokens = torch.tensor([letters.index(c) for c in written], device=device)
    return list(tokens.view(steps, batch, time + 1)), len(letters)
