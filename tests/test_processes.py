# SPDX-License-Identifier: MIT
"""Ops after a fork and in fresh processes, and steps without end in the same memory."""

import gc
import multiprocessing
import resource
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import metalcore


class _Normed(Dataset[Tensor]):
    """Samples that are made by metalcore, in whatever process asks for them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        x = torch.arange(1.0, 65.0).view(8, 8) + index
        return metalcore.rms_norm(metalcore.qr(x)[1])


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS starts workers afresh")
def test_workers_that_were_forked_after_ops() -> None:
    data = _Normed()
    metalcore.softmax(torch.randn(512, 4096))  # by all threads of this process
    expected = torch.stack([data[i] for i in range(len(data))])
    loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
    assert torch.equal(torch.cat(list(loader)), expected)


def _qr_of(rows: int) -> list[float]:
    with metalcore.trace() as t:
        y = metalcore.qr(torch.eye(8).expand(rows, 8, 8))[1]
    assert t.records[0].path.startswith("cpu:"), t
    return list(y.sum((-1, -2)).tolist())


def test_fresh_processes() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(_qr_of, [200, 300]) == [_qr_of(200), _qr_of(300)]


def _resident() -> int:
    """Bytes of this process in memory."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_two_thousand_steps_take_no_more_memory() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model gains nothing by more
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), metalcore.MetalRMSNorm(64), torch.nn.SiLU(), torch.nn.Linear(64, 8)
    )
    optimizer = metalcore.MetalAdamW(model.parameters(), lr=1e-3, clip_norm=1.0)
    x, target = torch.randn(16, 32), torch.randint(8, (16,))

    def steps(n: int) -> float:
        with metalcore.overrides():
            for _ in range(n):
                optimizer.zero_grad()
                loss = metalcore.cross_entropy(model(x), target)
                loss.backward()
                optimizer.step()
        return loss.item()

    first = steps(200)
    gc.collect()
    before = _resident()
    assert steps(2000) < first
    gc.collect()
    torch.set_num_threads(threads)
    assert _resident() - before < 4 << 20
