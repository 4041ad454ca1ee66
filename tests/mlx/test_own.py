# SPDX-License-Identifier: MIT
"""What is left to MLX's own ops on the CPU, and what is not."""

from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest

import metalcore
import metalcore.mlx as on_mlx
from metalcore.mlx import _own
from tests.mlx.cases import CASES, Case
from tests.mlx.ways import compare, found, truth


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def _is_own(case: Case) -> bool:
    more = {"weight_offset", "causal"} & case.named.keys()
    return case.function in _own._OWN and not more and len(case.args[0]) < 100


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if _is_own(c)])
def test_few_values_are_left_to_mlx(name: str) -> None:
    case = CASES[name]
    results, gradients = truth(case)
    with metalcore.trace() as t:
        ours, our_gradients = found(case, True)
    assert t.paths[case.function] == {"mlx"}
    compare(case, "result", ours, results, case.reduces_over)
    compare(case, "gradient", our_gradients, gradients, case.reduces_over)


X, W = mx.ones((2, 8)), mx.ones((8,))
OURS: dict[str, Callable[[], mx.array]] = {
    "many values": lambda: on_mlx.softmax(mx.ones((64, 1024))),
    "an argument that MLX has not": lambda: on_mlx.softmax(X, causal=True),
    "an offset": lambda: on_mlx.rms_norm(X, W, 1e-6, weight_offset=1.0),
    "half precision": lambda: on_mlx.silu(X.astype(mx.bfloat16)),
}


@pytest.mark.parametrize("name", OURS)
def test_all_else_is_ours(name: str) -> None:
    with metalcore.trace() as t:
        mx.eval(OURS[name]())
    assert all(r.path.split(":")[0] in ("cpu", "torch") for r in t.records)
    assert t.records


def test_errors_are_ours() -> None:
    for call in (
        lambda: on_mlx.rms_norm(X, mx.ones((3,)), 1e-6),
        lambda: on_mlx.softmax(X, axis=2),
        lambda: on_mlx.gelu(X, "other"),
    ):
        with pytest.raises(ValueError, match=r"(rms_norm|softmax|gelu): "):
            call()


def test_the_number_is_of_the_policy(write_policy: Callable[[str], None]) -> None:
    write_policy("[silu.mlx]\nvalues = 10\n")
    with metalcore.trace() as t:
        mx.eval(on_mlx.silu(mx.ones((9,))), on_mlx.silu(mx.ones((10,))))
    assert [r.path.split(":")[0] for r in t.records] == ["mlx", "cpu"]
