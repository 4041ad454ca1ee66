# SPDX-License-Identifier: MIT
"""Matrices trained by Muon, the rest by AdamW: python examples/muon.py"""

import torch

import metalcore


def main(steps: int = 100, width: int = 128) -> tuple[float, float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, width), torch.nn.SiLU(), torch.nn.Linear(width, 16)
    )
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [metalcore.MetalMuon(matrices, lr=2e-2), metalcore.MetalAdamW(others, lr=1e-2)]
    x = torch.randn(256, 16)
    target = x.flip(-1) * x.sigmoid()
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(model(x), target)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    nearest = metalcore.orthogonalize(matrices[0].detach())
    error = (nearest.mT @ nearest - torch.eye(16)).abs().max().item()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; orthogonal to {error:.1e}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
