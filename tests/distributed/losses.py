# SPDX-License-Identifier: MIT
"""Losses whose classes or tokens are split over processes: values, gradients, bytes and memory."""

import ctypes
import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import metalcore
from metalcore._accuracy import error, tolerance
from tests.distributed.launch import check

OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "z_loss": 1e-2},
    {"reduction": "none", "softcap": 5.0},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-3, "reduction": "none"},
]


def _full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def _compared(
    op: str, function: Callable[..., Tensor], whole: list[Tensor], parts: list[Tensor]
) -> None:
    """The loss and all gradients, weighted by token where there are some."""
    found = []
    for given in (whole, parts):
        leaves = [t.requires_grad_() for t in given]
        loss = function(*leaves)
        full = loss.full_tensor() if isinstance(loss, DTensor) else loss
        weights = torch.linspace(0.5, 1, full.numel()).view(full.shape)
        grads = torch.autograd.grad((full * weights).sum(), leaves)
        found.append([full.detach(), *map(_full, grads)])
    for a, b in zip(found[1], found[0], strict=True):
        off, allowed = error(a, b), 4 * tolerance(op, torch.float32, 1000)
        assert off <= allowed, f"off by {off:.2g}, allowed {allowed:.2g}"


@check
def cross_entropy() -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = torch.rand(51)
    cases = 0
    for size, options in itertools.product([(9, 51), (3, 51, 5), (51,)], OPTIONS):
        x = torch.randn(size) * 3
        target = torch.randint(51, (*size[:1], *size[2:]) if len(size) > 1 else ())
        if target.dim():
            target.view(-1)[1] = -100
        for place in (Replicate(), *(Shard(d) for d in range(len(size)))):
            for w in (None, weight):
                for t in (target, distribute_tensor(target, mesh, [Replicate()])):

                    def loss(x: Tensor, w: Any = w, t: Tensor = t, o: Any = options) -> Tensor:
                        plain = t.full_tensor() if isinstance(t, DTensor) else t
                        t = t if isinstance(x, DTensor) else plain
                        return metalcore.cross_entropy(x, t, w, **o)

                    part = distribute_tensor(x.detach(), mesh, [place])
                    _compared("cross_entropy", loss, [x.detach().clone()], [part])
                    cases += 1
    return cases


@check
def linear_cross_entropy() -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    hidden, weight, bias = torch.randn(3, 7, 16), torch.randn(51, 16), torch.randn(51)
    target = torch.randint(51, (3, 7))
    target[1, 2] = -100
    cases = 0
    for options, at, of_weight in itertools.product(
        OPTIONS, (Replicate(), Shard(0), Shard(1)), (Replicate(), Shard(0), Shard(1))
    ):

        def loss(h: Tensor, w: Tensor, b: Tensor, o: Any = options) -> Tensor:
            return metalcore.linear_cross_entropy(h, w, target, b, **o)

        whole = [t.clone() for t in (hidden, weight, bias)]
        of_bias = Shard(0) if of_weight == Shard(0) else Replicate()
        parts = [
            distribute_tensor(t, mesh, [p])
            for t, p in ((hidden, at), (weight, of_weight), (bias, of_bias))
        ]
        _compared("linear_cross_entropy", loss, whole, parts)
        cases += 1
    return cases


@check
def bytes_per_token() -> list[float]:
    """Three numbers per token, whatever the vocabulary; the hidden states' gradient is a sum."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sent = [0]
    original = dist.all_reduce

    def counted(x: Tensor, *args: Any, **named: Any) -> Any:
        sent[0] += x.numel() * x.element_size()
        return original(x, *args, **named)

    found = []
    for classes in (512, 4096):
        hidden = distribute_tensor(torch.randn(300, 32), mesh, [Replicate()])
        weight = distribute_tensor(torch.randn(classes, 32), mesh, [Shard(0)]).requires_grad_()
        target = torch.randint(classes, (300,))
        sent[0] = 0
        with mock.patch.object(dist, "all_reduce", counted):
            metalcore.linear_cross_entropy(hidden, weight, target).backward()
        found.append(sent[0] / 300)
    assert found == [12.0, 12.0], found
    return found


def _peak(function: Callable[[], Any]) -> int:
    """The bytes that memory grows by at most while `function` runs."""
    gc.collect()
    # what was freed before is not to be used again
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text
    before = int(status().split("VmRSS:")[1].split()[0])
    kept = function()
    after = int(status().split("VmHWM:")[1].split()[0])
    del kept
    return (after - before) * 1024


@check
def memory_of_a_large_vocabulary() -> Any:
    """128256 classes: a process has at most 60 % of what one process would have."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    classes, tokens, width = 128256, 512, 128
    hidden, target = torch.randn(tokens, width), torch.randint(classes, (tokens,))
    rows = classes // dist.get_world_size()

    def one() -> Any:
        weight = torch.full((classes, width), 0.01, requires_grad=True)
        metalcore.linear_cross_entropy(hidden, weight, target).backward()
        return weight

    def shared() -> Any:
        local = torch.full((rows, width), 0.01)
        weight = DTensor.from_local(local, mesh, [Shard(0)], run_check=False).requires_grad_()
        whole = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
        metalcore.linear_cross_entropy(whole, weight, target).backward()
        return weight

    shared()
    peaks = [_peak(shared), _peak(one)]
    dist.barrier()
    assert peaks[0] <= 0.6 * peaks[1], peaks
    return peaks
