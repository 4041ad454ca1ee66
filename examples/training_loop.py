# SPDX-License-Identifier: MIT
"""A plain training loop of a small Llama, accelerated: python examples/training_loop.py"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import metalcore


def main(steps: int = 50, hidden: int = 256, layers: int = 4) -> list[float]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    print(metalcore.accelerate(model))
    optimizer = metalcore.MetalAdamW(model.parameters(), lr=3e-3, clip_norm=1.0)
    text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 8))
    losses = []
    for _ in range(steps):
        tokens = text.unfold(0, 64, 16)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
