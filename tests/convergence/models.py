# SPDX-License-Identifier: MIT
"""Two small language models, each written once over the functions that compute its parts."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore

EPS = 1e-5


class Parts(NamedTuple):
    """What the models are made of: in plain torch, or of ours."""

    embed: Callable[[Tensor, Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor], Tensor]
    layer_norm: Callable[[Tensor, Tensor, Tensor], Tensor]
    add_layer_norm: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    swiglu_mlp: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    bias_gelu: Callable[[Tensor, Tensor], Tensor]
    tied_loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]


def _plain_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, bias, EPS), total


def _plain_mlp(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    n = F.rms_norm(x, norm.shape, norm, EPS)
    return x + F.linear(F.silu(F.linear(n, gate)) * F.linear(n, up), down)


def _plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The halves of x [B, H, T, D] are the two coordinates."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return metalcore.softmax(q @ k.mT, scale=q.shape[-1] ** -0.5, causal=True) @ v


PLAIN = Parts(
    embed=F.embedding,
    rms_norm=lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
    layer_norm=lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, EPS),
    add_layer_norm=_plain_add_layer_norm,
    rope=lambda q, k, cos, sin: (_plain_rotate(q, cos, sin), _plain_rotate(k, cos, sin)),
    attend=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    swiglu_mlp=_plain_mlp,
    bias_gelu=lambda x, bias: F.gelu(x + bias),
    tied_loss=lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target),
    loss=F.cross_entropy,
    optimizer=torch.optim.AdamW,
)
OURS = Parts(
    # bags of one
    embed=lambda tokens, weight: metalcore.embedding_bag(
        tokens.reshape(-1, 1), weight, mode="sum"
    ).view(*tokens.shape, -1),
    rms_norm=lambda x, weight: metalcore.rms_norm(x, weight, EPS),
    layer_norm=lambda x, weight, bias: metalcore.layer_norm(x, weight.shape, weight, bias, EPS),
    add_layer_norm=lambda x, residual, weight, bias: metalcore.add_layer_norm(
        x, residual, weight, bias, EPS
    ),
    rope=metalcore.apply_rotary_pos_emb,
    attend=_attend,
    swiglu_mlp=lambda x, norm, *weights: metalcore.fused_swiglu_mlp(
        x, *weights, rms_weight=norm, rms_eps=EPS
    ),
    bias_gelu=metalcore.bias_gelu,
    tied_loss=metalcore.linear_cross_entropy,
    loss=metalcore.cross_entropy,
    optimizer=metalcore.MetalAdamW,
)


class Size(NamedTuple):
    vocabulary: int
    width: int
    heads: int
    time: int
    layers: int = 2


class Model:
    """Parameters by name, drawn from a seed, and the loss of tokens [B, T + 1]."""

    ops: frozenset[str]
    """The ops of ours that a training step calls."""

    def __init__(
        self,
        parts: Parts,
        size: Size,
        seed: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self.parts, self.size = parts, size
        draw = torch.Generator().manual_seed(seed)
        self.weights: dict[str, Tensor] = {}
        for name, shape in self.shapes():
            if name.endswith("bias"):
                weight = torch.zeros(shape)
            elif name.endswith("norm"):
                weight = torch.ones(shape)
            else:
                weight = torch.randn(shape, generator=draw) * (0.5 / shape[-1] ** 0.5)
            self.weights[name] = weight.to(device, dtype).requires_grad_()

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        raise NotImplementedError

    def loss(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError

    def heads(self, x: Tensor) -> Tensor:
        """[B, T, width] to [B, H, T, D]."""
        return x.unflatten(-1, (self.size.heads, -1)).transpose(1, 2)


class Llama(Model):
    """RMSNorm, rotary positions, SwiGLU, the head tied to the embedding, no biases."""

    ops = frozenset(
        (
            "embedding_bag",
            "embedding_bag_backward",
            "rms_norm",
            "rms_norm_backward",
            "rope",
            "softmax",
            "softmax_backward",
            "swiglu",
            "swiglu_backward",
            "cross_entropy_",
            "adamw_step",
        )
    )

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        width, hidden = self.size.width, 3 * self.size.width
        yield "embedding", (self.size.vocabulary, width)
        for i in range(self.size.layers):
            yield from ((f"{i}.attention_norm", (width,)), (f"{i}.mlp_norm", (width,)))
            yield from ((f"{i}.qkv", (3 * width, width)), (f"{i}.out", (width, width)))
            yield from ((f"{i}.gate", (hidden, width)), (f"{i}.up", (hidden, width)))
            yield f"{i}.down", (width, hidden)
        yield "norm", (width,)

    def loss(self, tokens: Tensor) -> Tensor:
        w, parts = self.weights, self.parts
        x = parts.embed(tokens[:, :-1], w["embedding"])
        half = self.size.width // self.size.heads // 2
        angle = torch.outer(torch.arange(x.shape[1]), 100.0 ** -(torch.arange(half) / half))
        cos, sin = angle.cos().to(x), angle.sin().to(x)
        for i in range(self.size.layers):
            n = parts.rms_norm(x, w[f"{i}.attention_norm"])
            q, k, v = map(self.heads, F.linear(n, w[f"{i}.qkv"]).chunk(3, -1))
            q, k = parts.rope(q, k, cos, sin)
            y = parts.attend(q, k, v).transpose(1, 2).flatten(2)
            x = x + F.linear(y, w[f"{i}.out"])
            names = (f"{i}.{name}" for name in ("mlp_norm", "gate", "up", "down"))
            x = parts.swiglu_mlp(x, *(w[name] for name in names))
        x = parts.rms_norm(x, w["norm"]).flatten(0, 1)
        return parts.tied_loss(x, w["embedding"], tokens[:, 1:].flatten())


class Gpt(Model):
    """LayerNorm, learned positions, GELU, biases, and a head of its own."""

    ops = frozenset(
        (
            "embedding_bag",
            "embedding_bag_backward",
            "layer_norm",
            "layer_norm_backward",
            "add_layer_norm",
            "softmax",
            "softmax_backward",
            "bias_gelu",
            "bias_gelu_backward",
            "cross_entropy",
            "adamw_step",
        )
    )

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        width, hidden = self.size.width, 4 * self.size.width
        yield from (("embedding", (self.size.vocabulary, width)), ("at", (self.size.time, width)))
        for i in range(self.size.layers):
            for norm in ("attention_norm", "mlp_norm"):
                yield from ((f"{i}.{norm}", (width,)), (f"{i}.{norm}_bias", (width,)))
            linears = ("qkv", width, 3 * width), ("out", width, width)
            for name, k, n in (*linears, ("up", width, hidden), ("down", hidden, width)):
                yield from ((f"{i}.{name}", (n, k)), (f"{i}.{name}_bias", (n,)))
        yield from (("norm", (width,)), ("norm_bias", (width,)))
        yield from (("head", (self.size.vocabulary, width)),)

    def loss(self, tokens: Tensor) -> Tensor:
        w, parts = self.weights, self.parts

        def linear(x: Tensor, name: str) -> Tensor:
            return F.linear(x, w[name], w[f"{name}_bias"])

        x = parts.embed(tokens[:, :-1], w["embedding"]) + w["at"]
        for i in range(self.size.layers):
            n = parts.layer_norm(x, w[f"{i}.attention_norm"], w[f"{i}.attention_norm_bias"])
            q, k, v = map(self.heads, linear(n, f"{i}.qkv").chunk(3, -1))
            y = linear(parts.attend(q, k, v).transpose(1, 2).flatten(2), f"{i}.out")
            n, x = parts.add_layer_norm(y, x, w[f"{i}.mlp_norm"], w[f"{i}.mlp_norm_bias"])
            hidden = parts.bias_gelu(F.linear(n, w[f"{i}.up"]), w[f"{i}.up_bias"])
            x = x + linear(hidden, f"{i}.down")
        n = parts.layer_norm(x, w["norm"], w["norm_bias"])
        return parts.loss(F.linear(n, w["head"]).flatten(0, 1), tokens[:, 1:].flatten())


def train(model: Model, data: list[Tensor], lr: float, warmup: int, **options: Any) -> list[float]:
    """The loss of each step."""
    optimizer = model.parts.optimizer(model.weights.values(), lr=lr, **options)
    losses = []
    for step, tokens in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / warmup)
        optimizer.zero_grad()
        loss = model.loss(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
