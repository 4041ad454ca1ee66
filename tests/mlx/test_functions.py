# SPDX-License-Identifier: MIT
"""Every function of `metalcore.mlx`, in every way it is computed, against the float64 truth."""

from collections.abc import Iterator

import mlx.core as mx
import pytest
import torch

import metalcore
from metalcore.mlx import _table
from tests.mlx.cases import CASES
from tests.mlx.ways import WAYS, compare, converted, found, truth, way


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def test_every_function_has_a_case() -> None:
    cased = {case.function for case in CASES.values()}
    assert cased >= set(_table.FUNCTIONS) | {f"precise.{name}" for name in _table.PRECISE}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    results, gradients = truth(case)
    with metalcore.trace() as t, way(how, monkeypatch):
        ours, our_gradients = found(case, bool(gradients))
    compare(case, "result", ours, results, case.reduces_over)
    compare(case, "gradient", our_gradients, gradients, case.reduces_over)
    paths = {r.path.split(":")[0] for r in t.records}
    allowed = {"cpu": {"cpu", "torch"}, "sim": {"sim", "mlx"}, "mlx": {"mlx"}}
    assert paths <= allowed[how], t


HALVES = ("rms_norm", "layer_norm", "softmax", "silu", "gelu-2", "swiglu", "attention", "soft_cap")


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", HALVES)
def test_half_precisions(
    name: str, dtype: torch.dtype, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = converted(CASES[name], dtype)
    results, gradients = truth(case)
    with way(how, monkeypatch):
        ours, our_gradients = found(case, True)
    compare(case, "result", ours, results, case.reduces_over)
    compare(case, "gradient", our_gradients, gradients, case.reduces_over)
