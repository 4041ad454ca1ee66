# SPDX-License-Identifier: MIT
"""Every Metal kernel is executed by the simulator, and every barrier in one is needed."""

import re
from collections.abc import Iterator, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

import metalcore
import mslsim
from metalcore._op import Op
from metalcore._policy import policy
from metalcore.metal import launch, source

BARRIER = re.compile(r"(?:threadgroup|simdgroup)_barrier\([^;]*\);")


def _programs(file: str) -> Iterator[Sequence[launch.Step]]:
    """What the examples of the ops with kernels in `file` do, in each dtype."""
    for name, plan in launch.PLANS.items():
        values = policy(plan.__module__.rpartition(".")[2], "metal")
        for sample, dtype in product(Op.all[name].samples, launch.MSL_TYPE):
            torch.manual_seed(0)
            planned = plan(values, *sample(dtype).args)
            assert planned is not None
            if any(isinstance(step, launch.Launch) and step.file == file for step in planned[0]):
                yield planned[0]


def _barriers(text: str) -> list[tuple[str, int]]:
    """File and line of every barrier, by the line markers of an expanded source."""
    found, place = [], ("", 0)
    for line in text.splitlines():
        marker = re.match(r'#line (\d+) "([^"]+)"', line)
        if marker:
            place = (marker[2], int(marker[1]) - 1)
            continue
        place = (place[0], place[1] + 1)
        found += [place] * len(BARRIER.findall(line))
    return found


@pytest.mark.parametrize("file", source.files())
def test_removing_any_barrier_is_noticed(file: str) -> None:
    text = source.read(file)
    needless = set(_barriers(text))
    library = mslsim.compile_shader(text, on_finding="collect")
    for steps in _programs(file):
        for step in steps:
            if isinstance(step, launch.Call) or step.file != file:
                launch.run(step, mslsim.compile_shader)
                continue
            kernel = getattr(library, step.kernel)
            arguments = {"threads": step.threads, "group_size": step.group}
            for place in sorted(needless):
                # one copy of a tensor that is given twice: a result may take an input's memory
                copies = {id(a): a.clone() if isinstance(a, Tensor) else a for a in step.args}
                args = [copies[id(a)] for a in step.args]
                report = kernel(*args, **arguments, without_barrier_at=place)
                needless -= {place} if report.findings else set()
            kernel(*step.args, **arguments)
    assert not needless


@pytest.mark.parametrize("file", source.files())
def test_arrays_of_a_thread_are_in_registers(file: str) -> None:
    assert mslsim.lint(source.read(file), registers=True, name=file) == []


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
