# SPDX-License-Identifier: MIT
"""Principal components of many small clouds of points at once: python examples/pca.py"""

import torch

import metalcore


def main(clouds: int = 10_000, points: int = 64, dimensions: int = 8) -> torch.Tensor:
    torch.manual_seed(0)
    spread = torch.linspace(3, 0.1, dimensions)
    x = torch.randn(clouds, points, dimensions) * spread
    x = x - x.mean(1, keepdim=True)
    _, singular, directions = metalcore.svd(x)  # columns of V: the components, largest first
    explained = singular.square() / singular.square().sum(-1, keepdim=True)
    projected = x @ directions[..., :2]
    print(f"{clouds} clouds, 2 of {dimensions} components explain", end=" ")
    print(f"{explained[:, :2].sum(-1).mean():.0%} of the variance; projected: {projected.shape}")
    return explained


if __name__ == "__main__":
    main()
