# SPDX-License-Identifier: MIT
"""A language model as mlx-lm writes them: small, with a norm, rope, attention and an MLP."""

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn


@partial(mx.compile, shapeless=True)
def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    return nn.silu(gate) * x


def scaled_dot_product_attention(
    queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any
) -> mx.array:
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


class Attention(nn.Module):
    def __init__(self, dims: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (dims // heads) ** -0.5
        self.qkv = nn.Linear(dims, 3 * dims, bias=False)
        self.o_proj = nn.Linear(dims, dims, bias=False)
        self.rope = nn.RoPE(dims // heads)

    def __call__(self, x: mx.array, mask: Any = None) -> mx.array:
        B, T, _ = x.shape
        q, k, v = mx.split(self.qkv(x).reshape(B, T, 3 * self.heads, -1).swapaxes(1, 2), 3, 1)
        y = scaled_dot_product_attention(self.rope(q), self.rope(k), v, None, self.scale, mask)
        return self.o_proj(y.swapaxes(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, dims: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(dims, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, dims, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Block(nn.Module):
    def __init__(self, dims: int, heads: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(dims, heads), MLP(dims, 2 * dims)
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(dims) for _ in range(2))

    def __call__(self, x: mx.array, mask: Any = None) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Stem(nn.Module):
    def __init__(self, vocabulary: int, dims: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, dims)
        self.layers = [Block(dims, heads) for _ in range(layers)]
        self.norm = nn.RMSNorm(dims)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, "causal")
        return self.norm(x)


class Model(nn.Module):
    def __init__(
        self,
        vocabulary: int = 50,
        dims: int = 32,
        heads: int = 2,
        layers: int = 2,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.model = Stem(vocabulary, dims, heads, layers)
        if not tied:
            self.lm_head = nn.Linear(dims, vocabulary, bias=False)

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.model(tokens)
        return (
            self.lm_head(hidden) if "lm_head" in self else self.model.embed_tokens.as_linear(hidden)
        )
