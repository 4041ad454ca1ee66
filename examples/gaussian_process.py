# SPDX-License-Identifier: MIT
"""Many Gaussian processes, each with a scale of its own that is learned:
python examples/gaussian_process.py"""

import math

import torch

import metalcore


def likelihood(x: torch.Tensor, y: torch.Tensor, log_scale: torch.Tensor) -> torch.Tensor:
    """Log marginal likelihood of each process; x and y are [processes, points]."""
    apart = (x.unsqueeze(-1) - x.unsqueeze(-2)) / log_scale.exp().view(-1, 1, 1)
    kernel = (-0.5 * apart.square()).exp() + 0.01 * torch.eye(x.shape[-1])
    factor = metalcore.cholesky(kernel)
    half = metalcore.trsm(factor, y.unsqueeze(-1)).squeeze(-1)
    log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * (half.square().sum(-1) + log_det + x.shape[-1] * math.log(2 * math.pi))


def main(processes: int = 500, points: int = 32, steps: int = 60) -> tuple[float, float]:
    torch.manual_seed(0)
    x = torch.rand(processes, points).sort(-1).values * 10
    y = (x * torch.linspace(0.3, 2, processes).unsqueeze(-1)).sin()
    log_scale = torch.zeros(processes, requires_grad=True)
    optimizer = metalcore.MetalAdamW([log_scale], lr=0.1, weight_decay=0)
    found = []
    for _ in range(steps):
        loss = -likelihood(x, y, log_scale).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    scales = log_scale.exp()
    print(f"negative log likelihood {found[0]:.2f} -> {found[-1]:.2f}")
    print(f"scales: {scales[0]:.2f} for slow waves, {scales[-1]:.2f} for fast ones")
    return found[0], found[-1]


if __name__ == "__main__":
    main()
