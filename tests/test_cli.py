# SPDX-License-Identifier: MIT
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import metalcore
from metalcore import doctor
from metalcore.cli import app

run = CliRunner().invoke


def test_doctor_reports_every_op_and_ends_well() -> None:
    found = run(app, ["doctor", "--json"])
    report = json.loads(found.stdout)
    assert found.exit_code == 0, report["problems"]
    assert report["ok"] is True
    assert report["cpu"]["kernels"] in report["cpu"]["built_for"]
    assert {"rms_norm", "add_rms_norm"} <= {entry["op"] for entry in report["ops"]}
    assert all(entry["ok"] for entry in report["ops"])


def test_doctor_prints_a_summary_and_all_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    report = doctor.examine()
    monkeypatch.setattr(doctor, "examine", lambda: report)
    short, long = run(app, ["doctor"]), run(app, ["doctor", "--all"])
    assert short.exit_code == long.exit_code == 0
    assert "Everything works." in short.stdout
    count = len(report["ops"])
    assert f"{count} of {count} results" in short.stdout
    assert len(short.stdout.splitlines()) < 30 < count < len(long.stdout.splitlines())


def test_doctor_fails_when_a_result_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metalcore._where.tolerance", lambda *_: -1.0)
    report = doctor.examine()
    monkeypatch.setattr(doctor, "examine", lambda: report)
    found = run(app, ["doctor", "--json"])
    assert found.exit_code == 1
    assert any("rms_norm on cpu" in p for p in json.loads(found.stdout)["problems"])
    assert "wrong" in run(app, ["doctor"]).stdout


def test_version() -> None:
    assert run(app, ["--version"]).stdout.split() == ["metalcore", metalcore.__version__]


def test_doctor_fails_without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metalcore._native.isa", None)
    monkeypatch.setattr("metalcore._native.problem", "not built")
    found = run(app, ["doctor"])
    assert found.exit_code == 1
    assert "no compiled CPU kernels: not built" in found.stdout


def test_doctor_reports_a_torch_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = subprocess.CompletedProcess(args=[], returncode=-4)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: killed)
    assert doctor.probe_bfloat16_matmul() == (
        "torch is killed by SIGILL; set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
    )


def test_bench_starts_again_where_torch_would_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr("os.execve", lambda _, argv, env: started.append((argv, env)))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(doctor, "probe_bfloat16_matmul", lambda: "works")
    doctor.restart_where_bfloat16_is_broken()
    assert started == []
    monkeypatch.setattr(doctor, "probe_bfloat16_matmul", lambda: "torch is killed by SIGILL")
    doctor.restart_where_bfloat16_is_broken()
    ((argv, env),) = started
    assert argv == [sys.executable, *sys.orig_argv[1:]]
    assert env["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"


def test_info_shows_schema_kernels_and_policy() -> None:
    found = json.loads(run(app, ["info", "rms_norm", "--json"]).stdout)
    assert found["schema"].startswith("rms_norm(Tensor x")
    assert found["backends"] == {
        "cpu": ["float32", "float64", "float16", "bfloat16"],
        "metal": ["float32", "float16", "bfloat16"],
    }
    assert found["policy"]["metal"]["threads"] == 512
    assert "policy metal" in run(app, ["info"]).stdout


def test_info_names_the_ops_there_are() -> None:
    found = run(app, ["info", "nothing"])
    assert found.exit_code == 2
    assert "rms_norm_backward" in found.output


def test_a_name_that_is_nearly_right() -> None:
    for args, meant in (
        (["info", "rmsnorm"], "rms_norm"),
        (["bench", "train/rmsnorm"], "train/rms_norm"),
        (["tune", "sofmax"], "softmax"),
    ):
        found = run(app, args)
        assert found.exit_code == 2
        text = " ".join(found.output.replace("│", " ").split())
        assert f"did you mean {meant}" in text, text


def test_tune_shows_what_applies_and_where_it_comes_from(
    write_policy: Callable[[str], Path],
) -> None:
    file = write_policy(
        '[silu]\nmeasured = "a slow day"\nfloat32 = { from = 77, ratio = 1.5 }\n'
        "[qr.cpu]\ninterleaved_up_to = 99\n"
    )
    found = run(app, ["tune", "--show", "silu", "qr"])
    assert found.exit_code == 0
    for text in ("77", "1.5x", "a slow day", file.name, "99", "built in", "number: qr"):
        assert text in found.output, text
    assert run(app, ["tune", "nothing"]).exit_code == 2


def test_the_module_is_a_command() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "metalcore", "--help"], capture_output=True, text=True, check=True
    )
    for command in ("doctor", "bench", "demo", "info", "tune"):
        assert command in found.stdout


def test_docs_show_the_table_that_info_prints() -> None:
    ops = (Path(__file__).parent.parent / "docs/ops.md").read_text()
    assert run(app, ["info", "--markdown"]).stdout in ops


def test_has_metal_kernels_tells_the_truth() -> None:
    import torch

    assert metalcore.has_metal_kernels() is torch.backends.mps.is_available()
