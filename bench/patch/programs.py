# SPDX-License-Identifier: MIT
"""Whole programs written for torch, with overrides and without: what a function gains may be lost
in what comes after it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

import metalcore

from ..harness import Bench
from ..program._steps import bench as of_model
from ..program._steps import llama, training_steps

Program = Callable[..., Sequence[Tensor]]
_BOTH = (torch.float32, torch.float64)


def _compared(
    name: str,
    program: Program,
    inputs: Callable[..., Sequence[Tensor]],
    point: Mapping[str, int],
    reduces_over: Callable[..., int],
    dtypes: tuple[torch.dtype, ...] = _BOTH,
) -> Bench:
    def overridden(*args: Tensor) -> Sequence[Tensor]:
        with metalcore.overrides():
            return program(*args)

    return Bench(
        op="patch/programs",
        kind=name,
        run=overridden,
        peers={"torch": program},
        inputs=inputs,
        sweep=[point],
        dtypes=dtypes,
        truth=program,
        reduces_over=reduces_over,
    )


def _kalman(F: Tensor, H: Tensor, z: Tensor) -> list[Tensor]:
    """A Kalman filter for many tracks at once: F [D, D], H [M, D], z [steps, tracks, M, 1]."""
    tracks, states = z.shape[1], F.shape[0]
    eye = torch.eye(states, dtype=F.dtype)
    noise = torch.eye(H.shape[0], dtype=F.dtype)
    x, P = F.new_zeros(tracks, states, 1), eye.expand(tracks, -1, -1)
    for seen in z:
        x, P = F @ x, F @ P @ F.mT + 0.1 * eye
        PH = P @ H.mT
        K = torch.linalg.solve(H @ PH + noise, PH.mT).mT
        x, P = x + K @ (seen - H @ x), (eye - K @ H) @ P
    return [x, P]


def _tracks(tracks: int, states: int, seen: int, steps: int, dtype: torch.dtype) -> list[Tensor]:
    F = torch.eye(states, dtype=dtype) + 0.1 * torch.randn(states, states, dtype=dtype) / states
    H = torch.randn(seen, states, dtype=dtype)
    return [F, H, torch.randn(steps, tracks, seen, 1, dtype=dtype)]


def _gaussian_process(x: Tensor, y: Tensor, log_scale: Tensor) -> list[Tensor]:
    """A step of exact Gaussian processes, as gpytorch takes it: the marginal likelihood of each,
    and its gradient. x [batch, N, D], y [batch, N, 1]."""
    scale = log_scale.detach().requires_grad_()
    distance = (x[:, :, None] - x[:, None]).square().sum(-1)
    kernel = torch.exp(-distance / (2 * scale.exp()[:, None, None]))
    K = kernel + 0.1 * torch.eye(x.shape[1], dtype=x.dtype)
    L, _ = torch.linalg.cholesky_ex(K, out=None)
    alpha = torch.cholesky_solve(y, L)
    fit = (y * alpha).sum((-2, -1))
    loss = fit + 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    (grad,) = torch.autograd.grad(loss.sum(), scale)
    return [loss.detach(), grad]


def _points(batch: int, n: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    x, y = torch.randn(batch, n, d, dtype=dtype), torch.randn(batch, n, 1, dtype=dtype)
    return [x, y, torch.zeros(batch, dtype=dtype)]


def _shampoo(grads: Tensor) -> list[Tensor]:
    """Blocked Shampoo: each block of a gradient [blocks, N, N] between inverse fourth roots."""

    def root(A: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(A)
        return vectors * (values + 1).pow(-0.25)[..., None, :] @ vectors.mT

    return [root(grads @ grads.mT) @ grads @ root(grads.mT @ grads)]


def _whiten(x: Tensor) -> list[Tensor]:
    """ZCA whitening of groups of channels [groups, samples, channels]."""
    centered = x - x.mean(-2, keepdim=True)
    cov = centered.mT @ centered / x.shape[-2]
    values, vectors = torch.linalg.eigh(cov)
    return [centered @ (vectors * (values + 1e-3).rsqrt()[..., None, :]) @ vectors.mT]


def _gradients(blocks: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(blocks, n, n, dtype=dtype)]


def _samples(groups: int, samples: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(groups, samples, n, dtype=dtype)]


_WORDS, _LAYERS = 8000, 2
_llama = partial(llama, _WORDS, _LAYERS, width=256)


BENCHES = (
    _compared(
        *("kalman filter", _kalman, _tracks),
        {"tracks": 500, "states": 8, "seen": 4, "steps": 20},
        # each step sums over the last one's sums
        lambda F, H, z: z.shape[0] * F.numel(),
    ),
    _compared(
        *("gaussian process", _gaussian_process, _points),
        {"batch": 64, "n": 64, "d": 4},
        lambda x, y, scale: x.shape[1] ** 2,
    ),
    _compared(
        *("shampoo", _shampoo, _gradients, {"blocks": 64, "n": 64}),
        lambda grads: grads.shape[-1] ** 2,
    ),
    _compared(
        *("zca whitening", _whiten, _samples, {"groups": 64, "samples": 256, "n": 16}),
        lambda x: x.shape[-2] * x.shape[-1],
    ),
    of_model(
        "patch/programs",
        "training step",
        _llama,
        training_steps(_llama, around=metalcore.overrides),
        {"torch": training_steps(_llama)},
        batch=2,
        tokens=128,
        words=_WORDS,
        layers=_LAYERS,
    ),
)
