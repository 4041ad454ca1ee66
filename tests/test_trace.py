# SPDX-License-Identifier: MIT
import os
import subprocess
import sys

import pytest
import torch

import metalcore
from metalcore import _native

RUN = (
    "import metalcore, torch\n"
    "x = torch.randn(2, 5, 1025)\n"
    "with metalcore.trace() as t:\n"
    "    y = metalcore.MetalRMSNorm(1025)(x)\n"
    "print(tuple(y.shape), t.records[0].path)\n"
)


def run(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith("METALCORE_")}
    return subprocess.run(
        [sys.executable, "-c", program], env=base | env, capture_output=True, text=True
    )


def test_records_say_what_ran() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with metalcore.trace() as t:
        metalcore.rms_norm(x).sum().backward()
    first, second = t.records
    assert (first.op, first.device, first.dtype, first.shape) == (
        "rms_norm",
        "cpu",
        "float32",
        (3, 8),
    )
    assert first.path == f"cpu:{_native.isa}"
    assert first.variant == "rows"
    assert second.op == "rms_norm_backward"
    assert first.seconds > 0
    assert t.paths == {"rms_norm": {first.path}, "rms_norm_backward": {first.path}}
    assert "rms_norm_backward" in str(t)


def test_the_summary_adds_up_calls() -> None:
    with metalcore.trace() as t:
        for _ in range(3):
            metalcore.rms_norm(torch.randn(3, 8))
    (row,) = [line for line in t.summary().splitlines() if "rms_norm" in line]
    *_, variant, calls, ms, _ = (cell.strip() for cell in row.split("│"))
    assert (variant, calls) == ("rows", "3")
    assert float(ms) == pytest.approx(sum(r.seconds for r in t.records) * 1e3, abs=1e-3)


def test_nothing_is_recorded_outside_the_block() -> None:
    with metalcore.trace() as t:
        torch.ones(2).add(1)
    metalcore.rms_norm(torch.randn(2, 8))
    assert t.records == []


def test_the_best_library_is_loaded() -> None:
    found = run(RUN)
    best = next(s for s in _native.usable_sets() if s in _native.built_sets())
    assert found.stdout.split(") ")[1].strip() == f"cpu:{best}", found.stderr


def test_without_the_compiled_part_the_reference_computes() -> None:
    found = run(RUN, METALCORE_CPU="none")
    assert found.stdout.strip() == "(2, 5, 1025) reference", found.stderr


def test_the_variant_of_another_op_does_not_stay() -> None:
    with metalcore.trace() as t:
        metalcore.rms_norm(torch.randn(4, 64))
        metalcore.rms_norm(torch.randn(4, 64, device="meta"))
    assert [(r.device, r.path, r.variant) for r in t.records[1:]] == [("meta", "reference", "")]


def test_strict_forbids_the_reference() -> None:
    found = run(RUN, METALCORE_CPU="none", METALCORE_STRICT="1")
    assert found.returncode == 1
    assert found.stderr.strip().splitlines()[-1] == (
        "RuntimeError: rms_norm: no cpu kernel for float32 runs here, and METALCORE_STRICT=1 "
        "forbids the reference; `metalcore doctor` tells what is missing"
    )


def test_an_unknown_instruction_set_is_named() -> None:
    found = run("import metalcore", METALCORE_CPU="avx9")
    assert "METALCORE_CPU must be one of" in found.stderr
    assert "got avx9" in found.stderr


def test_a_library_that_does_not_load_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    broken = tmp_path_factory.mktemp("lib") / "_cpu_broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(_native, "_libraries", lambda: {"broken": broken})
    monkeypatch.setattr(_native, "usable_sets", lambda: ("broken",))
    monkeypatch.setattr(_native, "problem", None)
    with pytest.warns(UserWarning, match="_cpu_broken.so does not load"):
        _native.load()
    assert "does not load" in str(_native.problem)


def test_compiled_libraries_hold_no_python_symbol() -> None:
    assert _native.built_sets()
    for path in _native._libraries().values():
        assert b"PyObject" not in path.read_bytes()
        assert b"Py_Init" not in path.read_bytes()


def test_kernels_refuse_what_they_would_misread() -> None:
    x, rstd = torch.randn(2, 8), torch.rand(2)
    backward = torch.ops.metalcore.rms_norm_backward
    for bad in (
        (x.half(), x, None, rstd, 0.0, None, False),
        (x[:1], x, None, rstd, 0.0, None, False),
        (x, x, None, rstd.half(), 0.0, None, False),
        (x, x, None, rstd[:1], 0.0, None, False),
        (x, x, torch.ones(7), rstd, 0.0, None, True),
        (x, x, None, rstd, 0.0, x[:1], False),
    ):
        with pytest.raises(RuntimeError, match=r"rms_norm_backward: .* must have"):
            backward(*bad)
    with pytest.raises(RuntimeError, match="add_rms_norm: residual must have"):
        torch.ops.metalcore.add_rms_norm(x, x[:, :4], None, 1e-6, 0.0)
