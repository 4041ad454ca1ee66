# SPDX-License-Identifier: MIT
"""A small Llama, trained for three steps by plain torch in one process, for checks to compare."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 3
# a larger eps than usual: of gradients that are nearly zero, AdamW sees the sign of their error
ADAMW = {"lr": 1e-2, "eps": 1e-4}


def model(tied: bool = False) -> nn.Module:
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        tie_word_embeddings=tied,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


@cache
def batch() -> Tensor:
    return torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(2))


def own_batch() -> Tensor:
    return batch().chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(net: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = net(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: Tensor,
    clip: Callable[[], Any] | None = None,
    loss: Callable[[nn.Module, Tensor], Tensor] = loss_of,
    steps: int = STEPS,
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss(net, ids).backward()
        if clip is not None:
            clip()
        optimizer.step()


@cache
def truth(tied: bool = False, clip: float | None = None, steps: int = STEPS) -> dict[str, Tensor]:
    """The parameters of plain torch after training in one process."""
    net = model(tied)
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW)
    parts = batch().chunk(dist.get_world_size())
    for _ in range(steps):
        optimizer.zero_grad()
        # the mean of the means, as processes take it
        torch.stack([loss_of(net, ids) for ids in parts]).mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return {name: p.detach() for name, p in net.named_parameters()}


def off(
    named: Iterable[tuple[str, Tensor]],
    tied: bool = False,
    clip: float | None = None,
    steps: int = STEPS,
    remove: str = "",
) -> float:
    """The largest difference of any parameter from the truth; the test holds it to a limit."""
    true = truth(tied, clip, steps)
    found = {name.replace(remove, ""): p for name, p in named}
    assert found.keys() == true.keys(), found.keys() ^ true.keys()
    return max(float((full(p) - true[name]).abs().max()) for name, p in found.items())


def full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()
