# SPDX-License-Identifier: MIT
"""Ours or torch: what decides, and that both compute the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore import _policy, tune
from metalcore._accuracy import error, tolerance
from metalcore._route import Matrices, Queries, Route, Rows, Systems, Values
from metalcore.patch.overrides import GROUPS

Write = Callable[[str], Path]
each_route = pytest.mark.parametrize("route", list(Route.all.values()), ids=lambda r: r.name)


def _by(call: Callable[[], Any]) -> set[str]:
    """The paths that a call takes, without what stands behind the colon."""
    with metalcore.trace() as t:
        call()
    return {r.path.split(":")[0] for r in t.records}


def _examples(route: Route) -> list[Tensor]:
    """A small and a larger tensor that the route is decided by, of each form."""
    kinds = [kind for kind in route.kinds() if kind.dtype is torch.float32]
    scans = [scan for kind in kinds for scan in tune.scans(route, kind)]
    return [scan.make(count) for scan in scans[:3] for count in scan.counts[:2]]


@each_route
def test_without_a_number_all_is_ours(route: Route, write_policy: Write) -> None:
    assert not any(route.prefers_torch(x) for x in _examples(route))


@each_route
def test_both_ways_give_the_same(route: Route) -> None:
    function = getattr(metalcore, route.op)
    for x in _examples(route):
        args = route.arguments(x.double())
        results = []
        for to_torch in (False, True):
            with route.forced(to_torch), metalcore.trace() as t:
                outputs = function(*args)
            assert ("torch" in t.paths.get(route.op, ())) is to_torch, t
            results.append([outputs] if isinstance(outputs, Tensor) else list(outputs))
        # the signs of vectors are free
        for ours, theirs in zip(*results, strict=True):
            assert ours.dtype == theirs.dtype
            allowed = tolerance(route.op, torch.float32, x.numel())
            assert error(ours.abs(), theirs.abs()) <= allowed


def test_values_decide_by_their_number_and_gradient(write_policy: Write) -> None:
    write_policy("[silu]\nfloat32 = { from = 100 }\nfloat32_recorded = { from = 300 }\n")
    x = torch.randn(300)
    leaf = x.clone().requires_grad_()
    assert _by(lambda: metalcore.silu(x[:99])) == {"torch"}
    assert _by(lambda: metalcore.silu(x[:100])) == {"cpu"}
    assert _by(lambda: metalcore.silu(leaf[:299])) == {"torch"}
    assert _by(lambda: metalcore.silu(leaf)) == {"cpu"}
    with torch.no_grad():
        assert _by(lambda: metalcore.silu(leaf[:299])) == {"cpu"}
    # nothing is said of other dtypes, nor of no values
    assert _by(lambda: metalcore.silu(x[:5].half())) == {"cpu"}
    assert _by(lambda: metalcore.silu(x[:0])) == {"cpu"}


def test_rows_decide_by_their_length_too(write_policy: Write) -> None:
    write_policy("[softmax]\nfloat32 = { up_to = [8, 32], from = [inf, 100] }\n")
    x = torch.randn(3200)
    assert _by(lambda: metalcore.softmax(x.view(-1, 8))) == {"torch"}
    assert _by(lambda: metalcore.softmax(x.view(-1, 10))) == {"cpu"}
    assert _by(lambda: metalcore.softmax(x[:90].view(-1, 30))) == {"torch"}
    # the last number holds for all longer ones
    assert _by(lambda: metalcore.softmax(x[:99])) == {"torch"}
    assert _by(lambda: metalcore.softmax(x)) == {"cpu"}


def test_queries_decide_by_their_length_and_values(write_policy: Write) -> None:
    rows = "{ up_to = [4, 16], from = [inf, 200] }"
    write_policy(f"[scaled_dot_product_attention.causal]\nfloat32 = {rows}\n")
    q = torch.randn(1, 2, 8, 16)
    attend = metalcore.scaled_dot_product_attention
    assert _by(lambda: attend(q[:, :, :4], q, q, is_causal=True)) == {"torch"}
    assert _by(lambda: attend(q, q, q, is_causal=True)) == {"cpu"}
    assert _by(lambda: attend(q[:, :1], q[:, :1], q[:, :1], is_causal=True)) == {"torch"}
    assert _by(lambda: attend(q[:, :, :4], q, q)) == {"cpu"}


def test_matrices_decide_by_side_form_and_number(write_policy: Write) -> None:
    write_policy("""
        [qr]
        float32 = { up_to = [4, 16], from = [3, 1] }
        float32_tall = { up_to = [16], from = [inf] }
        float32_alone = { up_to = [8, 16], from = [inf, 1] }
        float32_tall_alone = { up_to = [16], from = [inf] }
    """)
    A = torch.randn(3, 4, 4)
    assert _by(lambda: metalcore.qr(A[:2])) == {"torch"}
    assert _by(lambda: metalcore.qr(A)) == {"cpu"}
    assert _by(lambda: metalcore.qr(torch.randn(2, 5, 5))) == {"cpu"}
    assert _by(lambda: metalcore.qr(torch.randn(5, 5))) == {"torch"}
    assert _by(lambda: metalcore.qr(torch.randn(1, 9, 9))) == {"cpu"}
    for size in ((9, 40, 20), (9, 20, 40), (4, 2)):
        assert _by(lambda size=size: metalcore.qr(torch.randn(size))) == {"torch"}
    assert _by(lambda: metalcore.qr(torch.randn(39, 20))) == {"cpu"}


def test_systems_decide_by_their_right_sides(write_policy: Write) -> None:
    write_policy("""
        [trsm]
        float32_few = { up_to = [64], from = [inf] }
        float32_vector = { up_to = [64], from = [inf] }
    """)
    A = torch.eye(8) + torch.randn(8, 8).tril() / 8
    assert _by(lambda: metalcore.trsm(A, torch.randn(8, 2))) == {"torch"}
    assert _by(lambda: metalcore.trsm(A, torch.randn(8))) == {"torch"}
    assert _by(lambda: metalcore.trsm(A, torch.randn(8, 3))) == {"cpu"}


def test_tensors_of_several_dtypes_are_ours(write_policy: Write) -> None:
    write_policy("[layer_norm]\nfloat32 = { up_to = [8], from = [inf] }\n")
    x, weight = torch.randn(4, 8), torch.ones(8)
    assert _by(lambda: metalcore.layer_norm(x, (8,), weight)) == {"torch"}
    assert _by(lambda: metalcore.layer_norm(x, (8,), weight.bfloat16())) == {"cpu"}


def test_compilers_transforms_and_the_simulator_see_the_op() -> None:
    x, seen = torch.randn(5), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with Route.all["silu"].forced(to_torch=True):
        y = torch.compile(metalcore.silu, fullgraph=True, backend=backend)(x)
        assert "metalcore.silu.default" in seen
        torch.testing.assert_close(y, metalcore.silu(x))
        assert _by(lambda: torch.vmap(metalcore.silu)(x.view(5, 1))) == {"cpu"}
        with metalcore.simulate():
            assert _by(lambda: metalcore.silu(x)) == {"sim"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[qr]\nfloat23 = { from = 1 }", r"qr: .*\[qr\] sets float23, which is none of float32, "),
        ("[qr]\nfloat32 = 5", r"qr: .*\[qr\] float32 must have from, got 5"),
        ("[qr]\nfloat32 = { up_to = [4, 8], from = [1] }", "a number in from for each of up_to"),
        ('[silu]\nfloat32 = { from = "few" }', "silu: .* a number in from"),
    ],
)
def test_a_wrong_row_is_an_error(write_policy: Write, text: str, message: str) -> None:
    write_policy(text)
    op = text[1 : text.index("]")]
    with pytest.raises(ValueError, match=message):
        getattr(metalcore, op)(torch.eye(3))


@pytest.mark.parametrize("name", ["x86-avx2", "x86-avx512", "arm64-neon"])
def test_packaged_numbers_belong_to_something_and_say_how_they_were_measured(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _policy.PACKAGED / f"{name}.toml"
    monkeypatch.setattr(_policy, "packaged_file", lambda: file)
    monkeypatch.setenv("METALCORE_POLICY", "/nowhere")
    _policy.changed()
    known = {"override", *(route.name.partition(".")[0] for route in Route.all.values())}
    assert set(_policy._read(file)) <= known
    for route in Route.all.values():
        for row, where in route.sources().values():
            assert len(row.ratios) == len(row.starts), (route.name, where)
            assert "torch" in where
    monkeypatch.undo()
    _policy.changed()


def test_functions_and_overrides_follow_what_tune_writes(
    write_policy: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_policy("# mine\n[rope.metal]\nthreads = 64\n")
    monkeypatch.setattr(tune, "_VALUES", [64, 128])
    monkeypatch.setattr(tune, "_SECONDS", 0.0)
    monkeypatch.setattr(tune, "_AHEAD", 0.0)
    tune.run(["silu"], file)
    assert list(Route.all["silu"].sources()) == Route.all["silu"].kinds()
    assert _by(lambda: metalcore.silu(torch.ones(8))) == {"cpu"}
    # torch is so far ahead that nothing is ours
    monkeypatch.setattr(tune, "_AHEAD", 1e9)
    tune.run(["silu"], file)
    x = torch.randn(500)
    assert _by(lambda: metalcore.silu(x)) == {"torch"}
    with metalcore.overrides(**{g: g == "activations" for g in GROUPS}):
        assert not _by(lambda: torch.nn.functional.silu(x))
    text = file.read_text()
    assert text.startswith("# mine\n")
    assert text.count("[silu]") == 1
    assert _policy.policy("rope", "metal")["threads"] == 64


def test_a_crossover_is_looked_for_from_the_top(monkeypatch: pytest.MonkeyPatch) -> None:
    route = Route.all["silu"]
    asked: list[int] = []

    def race(route: Route, kind: Any, x: Tensor) -> tuple[float, float]:
        asked.append(x.numel())
        # ours wins from 512 on but for 1024, and by luck at 64
        return (2.0 if x.numel() in (64, 512, 2048, 4096) else 0.5), 1.0

    monkeypatch.setattr(tune, "race", race)
    scan = tune.Scan(0, [64, 128, 256, 512, 1024, 2048, 4096], torch.randn)
    assert tune.crossover(route, route.kinds()[0], scan, 0.0) == (512, 2.0)
    assert asked == [4096, 2048, 1024, 512, 256, 128]
    # torch's, where ours is ahead by less than a replaced function costs
    assert tune.crossover(route, route.kinds()[0], scan, 1.5) == (float("inf"), 2.0)


def test_every_kind_of_route_is_in_use() -> None:
    kinds = {type(route) for route in Route.all.values()}
    assert kinds == {Values, Rows, Queries, Matrices, Systems}
