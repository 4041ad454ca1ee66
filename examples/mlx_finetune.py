# SPDX-License-Identifier: MIT
"""Fine-tunes a small language model of MLX with metalcore's layers, loss and optimizer.

    python examples/mlx_finetune.py --steps 200

The model is written as mlx-lm writes them, so for one of mlx-lm the same three lines do: accelerate
it, take `metalcore.mlx.default_loss`, and `metalcore.mlx.optimizers.AdamW`.
"""

import argparse

import mlx.core as mx
import mlx.nn as nn

import metalcore.mlx

TEXT = "the kernel reads what it needs, writes what it must, and says what it did. " * 8


class Attention(nn.Module):
    def __init__(self, dims: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (dims // heads) ** -0.5
        self.qkv_proj = nn.Linear(dims, 3 * dims, bias=False)
        self.o_proj = nn.Linear(dims, dims, bias=False)
        self.rope = nn.RoPE(dims // heads)

    def __call__(self, x: mx.array) -> mx.array:
        B, T, D = x.shape
        heads = self.qkv_proj(x).reshape(B, T, 3 * self.heads, -1).swapaxes(1, 2)
        q, k, v = mx.split(heads, 3, 1)
        y = mx.fast.scaled_dot_product_attention(
            self.rope(q), self.rope(k), v, scale=self.scale, mask="causal"
        )
        return self.o_proj(y.swapaxes(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, dims: int, heads: int) -> None:
        super().__init__()
        self.self_attn = Attention(dims, heads)
        self.gate_proj, self.up_proj = (nn.Linear(dims, 2 * dims, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * dims, dims, bias=False)
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(dims) for _ in range(2))

    def __call__(self, x: mx.array) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(metalcore.mlx.swiglu(self.gate_proj(y), self.up_proj(y)))


class Stem(nn.Module):
    def __init__(self, words: int, dims: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(words, dims)
        self.layers = [Block(dims, heads) for _ in range(layers)]
        self.norm = nn.RMSNorm(dims)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Model(nn.Module):
    """Logits by the weight of the embedding."""

    def __init__(self, words: int, dims: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.model = Stem(words, dims, heads, layers)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.model.embed_tokens.as_linear(self.model(tokens))


def batches(size: int, length: int) -> tuple[mx.array, mx.array, int]:
    """Pieces of the text, where they start and stop, and how many words there are."""
    letters = sorted(set(TEXT))
    tokens = mx.array([letters.index(c) for c in TEXT])
    starts = mx.random.randint(0, len(TEXT) - length, (size, 1))
    lengths = mx.broadcast_to(mx.array([[0, length]]), (size, 2))
    return tokens[starts + mx.arange(length)], lengths, len(letters)


def main(steps: int, size: int, length: int, dims: int) -> tuple[float, float]:
    """Train; the loss of the first and of the last step."""
    mx.random.seed(0)
    model = Model(batches(1, 2)[2], dims)
    print(metalcore.mlx.accelerate(model))
    optimizer = metalcore.mlx.optimizers.AdamW(3e-3)
    step = nn.value_and_grad(model, metalcore.mlx.default_loss)
    losses = []
    for number in range(steps):
        tokens, lengths, _ = batches(size, length)
        (loss, _), gradients = step(model, tokens, lengths)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        losses.append(float(loss))
        if number % 10 == 0 or number == steps - 1:
            print(f"step {number}: loss {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--size", type=int, default=8, help="sequences per step")
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--dims", type=int, default=64, help="width of the model")
    main(**vars(parser.parse_args()))
