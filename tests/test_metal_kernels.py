# SPDX-License-Identifier: MIT
"""Every Metal kernel is executed by the simulator, and every barrier in one is needed."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import metalcore
import mslsim
from metalcore._op import Op
from metalcore.metal import plans, run, source
from metalcore.metal.plans import PLANS
from metalcore.metal.program import MSL_TYPE, Program

BARRIER = re.compile(r"(?:threadgroup|simdgroup)_barrier\([^;]*\);")


class Recording:
    """A library whose kernels are run as by `simulate`, and handed to `watch` first."""

    def __init__(self, text: str, watch: Callable[..., None]) -> None:
        self._library = mslsim.compile_shader(text, on_finding="collect")
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._library, name)

        def launch(*args: Any, **options: Any) -> None:
            self._watch(kernel, args, options)
            kernel(*args, **options)

        return launch


@cache
def _examples() -> dict[str, list[tuple[Program, Callable[[], Sequence[Any]]]]]:
    """By file, the programs of examples that run kernels of it, and how to make their arguments."""
    found: dict[str, list[tuple[Program, Callable[[], Sequence[Any]]]]] = {}
    for name, planned in PLANS.items():
        for sample, dtype in product(Op.all[name].samples, MSL_TYPE):

            def args(sample: Any = sample, dtype: torch.dtype = dtype) -> Sequence[Any]:
                torch.manual_seed(0)
                return sample(dtype).args

            program = planned.program(args())
            assert program is not None
            for file in {launch.file for launch in program.launches}:
                found.setdefault(file, []).append((program, args))
    return found


def _run_examples(file: str, compiler: Callable[[str], Any]) -> None:
    for program, args in _examples()[file]:
        run.Runner(program, run.Backend("sim", compiler), torch.device("cpu"))(args())


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
    needless = set(_barriers(source.read(file)))

    def watch(kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> None:
        for place in sorted(needless):
            # one copy of a tensor that is given twice: a result may take an input's memory
            copies = {id(a): a.clone() if isinstance(a, Tensor) else a for a in args}
            report = kernel(*(copies[id(a)] for a in args), **options, without_barrier_at=place)
            needless.difference_update({place} if report.findings else ())

    _run_examples(file, lambda text: Recording(text, watch))
    assert not needless


def test_every_kernel_is_reached() -> None:
    launches = (launch for program in plans.examples() for launch in program.launches)
    reached = {(launch.file, launch.function) for launch in launches}
    assert reached == {(file, name) for file in source.files() for name in source.signatures(file)}


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
    forget()
    with metalcore.simulate(), pytest.raises(mslsim.KernelError, match="race"):
        metalcore.rms_norm(torch.randn(3, 4096))
    forget()


def forget() -> None:
    """Read, plan and compile anew."""
    source.signatures.cache_clear()
    source.kernel.cache_clear()
    run.forget()
