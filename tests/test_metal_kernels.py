# SPDX-License-Identifier: MIT
"""Every Metal kernel is executed by the simulator, and every barrier in one is needed."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import metalcore
import mslsim
from metalcore._op import Op
from metalcore._policy import policy
from metalcore.metal import launch, source
from tests.backends import simulated_kernels

METAL = Path(source.__file__).parent
FILES = sorted(str(p.relative_to(METAL)) for p in METAL.glob("*/*.metal"))
BARRIER = re.compile(r"(?:threadgroup|simdgroup)_barrier\([^;]*\);")


def _launches(file: str) -> list[launch.Launch]:
    """What the examples of the ops in `file` launch, in each dtype."""
    found = []
    for name, plan in launch.PLANS.items():
        values = policy(plan.__module__.rpartition(".")[2], "metal")
        for dtype in launch.MSL_TYPE:
            planned = plan(values, *Op.all[name].sample(dtype).args)
            assert planned is not None
            found += [one for one in planned[0] if one.file == file]
    return found


@pytest.mark.parametrize("file", FILES)
def test_removing_any_barrier_is_noticed(file: str) -> None:
    text = source.read(file)
    barriers = list(BARRIER.finditer(text))
    assert barriers, "no kernel of this file has a barrier"
    for barrier in barriers:
        without = text[: barrier.start()] + text[barrier.end() :]
        library = mslsim.compile_shader(without, on_finding="collect")
        kinds = set()
        for one in _launches(file):
            report = getattr(library, one.kernel)(
                *one.args, threads=one.threads, group_size=one.group
            )
            kinds |= {finding.kind for finding in report.findings}
        assert kinds & {"race", "uninitialized"}, barrier[0]


def test_a_model_trains_through_the_simulator_under_a_trace() -> None:
    norm = metalcore.MetalRMSNorm(40)
    with metalcore.trace() as outer, metalcore.simulate(), metalcore.trace() as inner:
        norm(torch.randn(3, 40)).sum().backward()
    assert norm.weight.grad is not None
    for t in (outer, inner):
        assert [r.path.split("_float")[0] for r in t.records] == [
            "sim:rms_norm_simdgroup",
            "sim:rms_norm_backward",
        ]


def test_the_simulator_leaves_float64_to_the_cpu() -> None:
    with metalcore.simulate(), metalcore.trace() as t:
        metalcore.rms_norm(torch.randn(3, 40, dtype=torch.float64))
    assert t.records[0].path.startswith("cpu:")


def test_findings_are_raised_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    text = source.read("train/rms_norm.metal")
    broken = BARRIER.sub("", text)
    monkeypatch.setattr(source, "read", lambda file: broken)
    source.library.cache_clear()
    with metalcore.simulate(), pytest.raises(mslsim.KernelError, match="race"):
        metalcore.rms_norm(torch.randn(3, 4096))
    source.library.cache_clear()


@pytest.mark.runs_last
@pytest.mark.parametrize("file", FILES)
def test_every_kernel_was_simulated(file: str) -> None:
    built: Any = mslsim.compile_shader(source.read(file), "none")
    kernels = set(dir(built))
    assert kernels
    assert kernels - simulated_kernels == set()
