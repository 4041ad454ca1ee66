# SPDX-License-Identifier: MIT
"""Thousands of Kalman filters side by side, each following a track: python examples/kalman.py"""

import torch

import metalcore


def main(tracks: int = 5_000, steps: int = 50) -> tuple[float, float]:
    torch.manual_seed(0)
    dt = 0.1
    move = torch.eye(4) + dt * torch.diag(torch.ones(2), 2)  # position and speed, in the plane
    see = torch.eye(2, 4)
    drift, noise = 1e-3 * torch.eye(4), 0.25 * torch.eye(2)
    truth = torch.randn(tracks, 4)
    state, spread = torch.zeros(tracks, 4), torch.eye(4).repeat(tracks, 1, 1)
    for _ in range(steps):
        truth = truth @ move.mT
        seen = truth @ see.mT + 0.5 * torch.randn(tracks, 2)
        state, spread = state @ move.mT, move @ spread @ move.mT + drift
        surprise = see @ spread @ see.mT + noise
        factor = metalcore.cholesky(surprise)
        gain = metalcore.cholesky_solve(see @ spread, factor).mT
        state = state + (gain @ (seen - state @ see.mT).unsqueeze(-1)).squeeze(-1)
        spread = spread - gain @ see @ spread
    filtered = (state - truth)[:, :2].square().mean().sqrt().item()
    raw = (seen - truth[:, :2]).square().mean().sqrt().item()
    print(f"{tracks} tracks: error {raw:.3f} as seen, {filtered:.3f} filtered")
    return raw, filtered


if __name__ == "__main__":
    main()
