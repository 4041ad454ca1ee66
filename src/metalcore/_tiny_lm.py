# SPDX-License-Identifier: MIT
"""A small Llama-like language model in plain PyTorch, and text for it to learn."""

import random

import torch
from torch import Tensor, nn
from torch.nn import functional

MAX_TIME = 128


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, width = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # [B, H, T, D]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.out(y.transpose(1, 2).reshape(B, T, width))
        return projected


class Layer(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        down: Tensor = self.down(functional.silu(gate) * up)
        return x + down


class Decoder(nn.Module):
    """Tokens [B, T] to logits [B, T, vocabulary]; the head shares the embedding's weight."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, vocabulary: int, width: int = 256, heads: int = 4, layers: int = 4, hidden: int = 704
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        half = width // heads // 2
        angle = torch.outer(
            torch.arange(MAX_TIME), 10000.0 ** -(torch.arange(half) / half)
        )  # [T, D/2]
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        return functional.linear(self.norm(x), self.embedding.weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: the halves of x [B, H, T, D] are the two coordinates."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


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
