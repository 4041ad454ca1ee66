# SPDX-License-Identifier: MIT
"""Exact sums that are kept and merged: `"accumulator"`."""

import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import metalcore
from metalcore import precise
from metalcore.precise import Accumulator
from tests.backends import FLOATS, Backend
from tests.check import check_op
from tests.precise.exactly import KINDS, nearest, same_bits, total, values


@pytest.mark.parametrize("size", [(3, 33), (2, 2, 5), (1, 9000), (7,), (0, 64)], ids=str)
def test_limbs_match_their_reference(backend: Backend, size: tuple[int, ...]) -> None:
    for dtype in backend.dtypes:
        x = backend.randn(*size, dtype=dtype)
        check_op(backend, "precise_limbs", (x,), reduces_over=1, differentiable=False)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_in_any_order_are_the_sum_of_all(kind: str) -> None:
    for dtype in FLOATS:
        x = values(kind, 1, 301, dtype)
        parts = list(x.split(37))
        random.Random(0).shuffle(parts)
        found = Accumulator()
        for part in parts:
            found.add(part)
        assert found.count == 301
        truth = total(x)
        for to in FLOATS:
            assert found.sum(to).item() == nearest(truth, to)
            assert found.mean(to).item() == nearest(truth / 301, to)
        assert same_bits(found.sum(dtype), precise.sum(x, level="exact"))


def test_devices_and_accumulators_merge_to_the_same_integers() -> None:
    x = torch.stack([values(kind, 2, 40, torch.float32) for kind in KINDS])
    whole = Accumulator((len(x),)).add(x, -1)
    with metalcore.simulate():
        simulated = Accumulator((len(x),)).add(x[:, :20], -1)
    halves = Accumulator((len(x),)).add(x[:, 20:], -1).merge(simulated)
    assert torch.equal(whole.state_dict()["limbs"], halves.state_dict()["limbs"])


def test_what_is_not_finite_stays() -> None:
    cases = [
        ([math.inf, 1.0], math.inf),
        ([-math.inf], -math.inf),
        ([-0.0, -0.0], -0.0),
        ([-0.0, 0.0], 0.0),
    ]
    for terms, result in cases:
        found = Accumulator()
        for term in terms:
            found.add(torch.tensor(term))
        assert same_bits(found.sum(), torch.tensor(result))
    both = Accumulator().add(torch.tensor([math.inf])).add(torch.tensor([-math.inf]))
    assert both.sum().isnan()
    assert Accumulator().mean().isnan()
    assert Accumulator().sum() == 0
    large = Accumulator().add(torch.tensor([1.7e308, 1.7e308], dtype=torch.float64))
    assert large.sum(torch.float64) == math.inf
    assert large.mean(torch.float64).item() == 1.7e308


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    x = values("any exponent", 4, 100, torch.float32)
    torch.save(Accumulator().add(x[:50]).state_dict(), tmp_path / "sum.pt")
    found = Accumulator()
    found.load_state_dict(torch.load(tmp_path / "sum.pt"))
    found.add(x[50:])
    assert same_bits(found.sum(), precise.sum(x, level="exact"))
    assert found.count == 100


def _process(rank: int, store: str, results: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    x = values("cancelling", 9, 1001, torch.float32)
    mine = Accumulator().add(x[rank::2]).all_reduce()
    torch.save(mine.state_dict(), f"{results}{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_have_the_bits_of_one(tmp_path: Path) -> None:
    results = str(tmp_path / "rank")
    torch.multiprocessing.spawn(_process, args=(str(tmp_path / "store"), results), nprocs=2)
    x = values("cancelling", 9, 1001, torch.float32)
    alone = Accumulator().add(x).state_dict()["limbs"]
    for rank in range(2):
        found = Accumulator()
        found.load_state_dict(torch.load(f"{results}{rank}.pt"))
        assert torch.equal(found.state_dict()["limbs"], alone)
        assert same_bits(found.sum(), precise.sum(x, level="exact"))


def test_other_shapes_are_refused() -> None:
    message = r"Accumulator.add: sums must have the shape of the accumulator, \[3\], got \[4\]"
    with pytest.raises(ValueError, match=message):
        Accumulator((3,)).add(torch.ones(4, 5), -1)
    with pytest.raises(ValueError, match="limbs must be int64"):
        Accumulator().load_state_dict({"limbs": torch.zeros(3)})


def test_the_example_prints_the_same_for_any_number_of_processes(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs/precision.md"
    program = re.search(r"```py\n(# metric.py.*?)```", page.read_text(), re.DOTALL)
    assert program is not None
    file = tmp_path / "metric.py"
    file.write_text(program[1])
    lines = set()
    for processes in ("1", "2"):
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        run = subprocess.run(
            [sys.executable, *launch, str(file)], capture_output=True, text=True, env=environment
        )
        assert run.returncode == 0, run.stderr
        lines.add(run.stdout)
    assert len(lines) == 1
    assert lines.pop().endswith(" 1000\n")
