# SPDX-License-Identifier: MIT
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore.bench import harness, report, run
from metalcore.bench.compiled import against_compiler
from metalcore.bench.harness import Bench, Built, run_case
from metalcore.bench.limits import Limits
from metalcore.bench.machine import this_machine

FIELDS = [
    "op",
    "shape",
    "dtype",
    "backend",
    "variant",
    "ms",
    "peer",
    "peer_ms",
    "ratio",
    "gbps",
    "limit_fraction",
    "max_error",
]
LIMITS = Limits(copy_gbps={1 << 20: 10.0, 1 << 30: 5.0}, product_gflops={torch.float32: 100.0})


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(harness, "_BUDGET_SECONDS", 0.01)


def _missing(x: Tensor) -> None:
    import a_package_that_is_not_there  # noqa: F401


def _bench(**changes: object) -> Bench:
    values: dict[str, object] = {
        "op": "train/rms_norm",
        "run": lambda x: metalcore.rms_norm(x, None, 1e-6),
        "peers": {"torch": lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:], None, 1e-6)},
        "inputs": lambda rows, n, dtype: [torch.randn(rows, n, dtype=dtype)],
        "sweep": [{"rows": 3, "n": 40}],
        "dtypes": [torch.float32],
        "truth": lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:], None, 1e-6),
        "reduces_over": lambda x: x.shape[-1],
        "bytes_moved": lambda x: 2 * x.nbytes,
    }
    return Bench(**values | changes)  # type: ignore[arg-type]


def _rows(bench: Bench) -> list[harness.Row]:
    return [row for case in harness.cases([bench]) for row in run_case(case, "cpu", LIMITS)]


def test_a_row_has_the_agreed_fields_and_a_ratio() -> None:
    for backward in (False, True):
        (row,) = _rows(_bench(backward=backward))
        assert list(row.as_dict()) == FIELDS
        assert isinstance(row.ms, float)
        assert isinstance(row.peer_ms, float)
        assert row.ratio == row.peer_ms / row.ms
        assert row.backend.startswith("cpu:")
        assert row.shape == "3x40"
        assert row.max_error is not None
        assert row.max_error < 1e-5
    assert row.op == "train/rms_norm (forward+backward)"
    assert row.variant == "rows, blocks"


def test_a_wrong_result_is_not_timed() -> None:
    (row,) = _rows(_bench(run=lambda x: metalcore.rms_norm(x, None, 1e-6) * 1.01))
    assert str(row.ms).startswith("skipped: wrong result")
    assert row.ratio is None
    assert row.max_error is not None
    assert row.max_error > 1e-3


def test_a_peer_that_is_wrong_missing_or_failing_is_named() -> None:
    peers = {"wrong": lambda x: x, "missing": Built(_missing), "failing": lambda x: x @ x}
    wrong, missing, failing = _rows(_bench(peers=peers))
    assert str(wrong.peer_ms).startswith("skipped: wrong result")
    assert missing.peer_ms == "not installed: a_package_that_is_not_there"
    assert str(failing.peer_ms).startswith("failed: ")
    assert all(isinstance(row.ms, float) for row in (wrong, missing, failing))


def test_a_peer_may_take_some_of_the_cases() -> None:
    first, second = (_rows(_bench(sweep=[{"rows": n, "n": 40}]))[0] for n in (3, 4))
    (grid,) = report._grids([first, replace(first, peer="other"), second])
    assert [len(line) for line in grid.lines] == [len(grid.columns)] * 2
    assert grid.lines[1][grid.columns.index("other ms")] == "-"


@pytest.mark.parametrize("bench", run.select(["mlx"]), ids=lambda bench: bench.op)
def test_arrays_of_mlx_are_timed(bench: Bench) -> None:
    case = harness.Case(bench, bench.sweep[0], torch.float32)
    for row in run_case(case, "cpu", LIMITS):
        assert isinstance(row.ms, float), row.ms
        assert isinstance(row.peer_ms, float), row.peer_ms


def test_a_training_step_is_checked_timed_and_weighed() -> None:
    from metalcore.bench.program import _steps

    def build() -> torch.nn.Module:
        sizes = {"vocab_size": 500, "hidden_size": 32, "intermediate_size": 48}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
        return _steps.language_model("llama", use_cache=False, **sizes, **heads)

    run = _steps.training_steps(build, _steps.accelerated)
    plain = {"torch": _steps.training_steps(build)}
    sizes = {"batch": 2, "tokens": 16, "words": 500, "layers": 1}
    (row,) = _rows(_steps.bench("program/training_step", "", build, run, plain, **sizes))
    assert row.ratio is not None, (row.ms, row.peer_ms)
    assert row.mib is not None
    assert row.peer_mib is not None
    assert 0 < row.mib < row.peer_mib
    assert [*FIELDS, "mib", "peer_mib"] == list(row.as_dict())


def test_a_disturbed_run_is_told() -> None:
    machine = replace(this_machine("cpu"), cores=4, load=1.0)
    (row,) = _rows(_bench())
    assert report.doubts(machine, [replace(row, limit_fraction=1.0)]) == []
    busy, above = report.doubts(replace(machine, load=3.5), [row, replace(row, limit_fraction=1.3)])
    assert "busy (load 3.5 on 4 cores)" in busy
    assert "1 of 2 rows are above the limit" in above


def test_compiled_programs_come_last_and_are_asked_for() -> None:
    from metalcore.bench import run as runs

    (chosen,) = {b.op for b in runs.select(["program/compiled_step"])}
    assert chosen == "program/compiled_step"
    both = runs.select(["program/compiled_step", "program/training_step"])
    assert [b.compiles for b in runs._in_order(both, compile=False)] == [False]
    every = [b.compiles for b in runs._in_order(both, compile=True)]
    assert every == sorted(every)
    assert set(every) == {False, True}
    assert runs.run(["program/compiled_step"]) == 2


def test_torch_compile_is_a_peer_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _bench(compiled_at={"rows": 5, "n": 12}, kind="wide", backward=True)
    assert against_compiler([_bench()]) == []
    (last,) = against_compiler([_bench(), bench])
    assert last.title == "train/rms_norm (wide, compiler, forward+backward)"
    # another compiler, which takes no time, and then none
    from torch._inductor import config, cpp_builder

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **o: compiled(f, backend="aot_eager", **o))
    (row,) = _rows(last)
    assert (row.peer, row.shape) == ("torch.compile", "5x12")
    assert isinstance(row.peer_ms, float)
    with config.patch({"cpp.cxx": ("a-compiler-that-is-not-there",)}):
        cpp_builder.cpp_compiler_search.cache_clear()
        (row,) = _rows(last)
    cpp_builder.cpp_compiler_search.cache_clear()
    assert row.peer_ms == (
        "failed: torch.compile needs a C++ compiler; install g++ or name one in CXX"
    )
    assert isinstance(row.ms, float)


def test_every_benchmark_is_found_and_selected() -> None:
    assert {"train/rms_norm", "train/add_rms_norm"} <= set(run.available())
    assert len(run.select(["train/rms_norm"])) == 2
    assert len(run.select([])) == sum(map(len, run.available().values()))


def test_an_unknown_benchmark_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.run(["train/nothing"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "got train/nothing; there are" in told


def test_json_and_html_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "available", lambda: {"train/rms_norm": (_bench(),)})
    monkeypatch.setattr(run, "measure", lambda *_, **__: LIMITS)
    before = torch.get_num_threads()
    assert run.run([], tmp_path / "b.json", tmp_path / "b.html", threads=1) == 0
    torch.set_num_threads(before)
    content = json.loads((tmp_path / "b.json").read_text())
    assert list(content["rows"][0]) == FIELDS
    html = (tmp_path / "b.html").read_text()
    assert "<svg" in html
    assert "train/rms_norm" in html


def test_a_sweep_is_plotted_over_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = [{"rows": 3, "n": n} for n in (8, 16, 64)]
    bench = _bench(sweep=sweep, plot_over="n")
    monkeypatch.setattr(run, "available", lambda: {"train/rms_norm": (bench,)})
    monkeypatch.setattr(run, "measure", lambda *_, **__: LIMITS)
    assert run.run([], html=tmp_path / "b.html") == 0
    html = (tmp_path / "b.html").read_text()
    assert "times as fast as the fastest peer" in html
    curves = [line for line in html.splitlines() if "<polyline" in line]
    assert len(curves) == 1
    assert curves[0].split('points="')[1].split('"')[0].count(",") == 3
    assert 'class="mark"' in html


def test_a_wrong_result_ends_with_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = _bench(run=lambda x: x)
    monkeypatch.setattr(run, "available", lambda: {"train/rms_norm": (wrong,)})
    monkeypatch.setattr(run, "measure", lambda *_, **__: LIMITS)
    assert run.run([]) == 1


@pytest.mark.parametrize("measured", [0, 2])
def test_an_interrupt_keeps_what_was_measured(
    measured: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def run_some(*given: Any) -> list[harness.Row]:
        calls.append(given)
        if len(calls) > measured:
            raise KeyboardInterrupt
        return run_case(*given)

    sweep = [{"rows": 3, "n": n} for n in (8, 16, 64)]
    monkeypatch.setattr(run, "available", lambda: {"train/rms_norm": (_bench(sweep=sweep),)})
    monkeypatch.setattr(run, "measure", lambda *_, **__: LIMITS)
    monkeypatch.setattr(run, "run_case", run_some)
    assert run.run([], tmp_path / "b.json", tmp_path / "b.html") == 130
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert len({row["shape"] for row in rows}) == measured


def test_the_simulator_counts_what_kernels_move() -> None:
    from metalcore.bench import counters

    (case,) = harness.cases([_bench(sweep=[{"rows": 64, "n": 4096}])])
    counted = counters.count(case)
    assert counted.findings == 0
    assert counted.kernels == "rms_norm_float_float_4_4"
    # the row is read once and written once; the rest is one rstd per row
    assert counted.ratio <= 1.05
    assert 5 < counted.slots_per_value < 50
    assert [time.chip for time in counted.times] == ["M1", "M2 Max", "M4 Pro"]
    assert 0 < counted.times[0].issue_share < 1
    assert counters.run([_bench()]) == 0


def test_kernels_of_others_are_profiled_beside_ours() -> None:
    from metalcore.bench import beside, peer_kernels

    (softmax,) = {job.theirs["mlx"] for job in beside.JOBS if job.name == "softmax"}
    theirs = {"mlx": softmax, "torch": lambda at, x: peer_kernels.torch_silu(at, x)}
    job = beside.Job("softmax", lambda d: [torch.randn(3, 256, dtype=d)], metalcore.softmax, theirs)
    ours, mlx, missing = beside.compare(job, torch.float32, peer_kernels.Sources())
    assert (ours.library, mlx.library, mlx.group) == ("metalcore", "mlx", 64)
    for side in (ours, mlx):
        assert side.bytes == pytest.approx(8, rel=0.01)
        assert side.slots > 10
        assert 0 < side.issue_share < 2
    assert missing.problem.startswith("pytorch: aten/src/ATen/native/mps/kernels/Activation")
    assert "| softmax 3x256 float32 | metalcore |" in beside.table([ours, mlx, missing])
