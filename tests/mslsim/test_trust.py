# SPDX-License-Identifier: MIT
"""Sources and launch files that nobody wrote with good intent, and runs that are cut off."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import mslsim
from mslsim import compiler, isolated, process
from mslsim.cli import app

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
KERNEL = "kernel void k(device int* y, uint i [[thread_position_in_grid]])"
SLOW = HEAD + KERNEL + "{ for (int n = 0; n < 2000000000; ++n) y[i] += n % 7; }"


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Shells start programs in the background with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def write(value: int) -> str:
    return HEAD + KERNEL + f"{{ y[i] = {value}; }}"


class Interrupt:
    """Raises KeyboardInterrupt as a line of `process.py` is reached, in the process that waits; or
    lists these lines."""

    def __init__(self, at: tuple[str, int] | None = None) -> None:
        self.at = at
        self.seen: dict[tuple[str, int], None] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if Path(frame.f_code.co_filename) != Path(process.__file__):
            return None
        if event == "line":
            place = (frame.f_code.co_name, frame.f_lineno)
            self.seen[place] = None
            if place == self.at:
                raise KeyboardInterrupt
        return self

    def run(self, text: str, y: Any) -> bool:
        """Whether the run ended by it."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            mslsim.run(text, "k", [y], 4, 4)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


def test_an_interrupted_run_leaves_nothing_to_the_next() -> None:
    y, others = np.zeros(4, np.int32), np.zeros(4, np.int32)
    isolated.worker().stop()
    every = Interrupt()
    every.run(write(1), y)
    interrupted = set()
    for number, place in enumerate(every.seen):
        if place[0] == "_start":
            isolated.worker().stop()
        interrupt = Interrupt(place)
        is_ended = interrupt.run(write(1), others)
        # how often it looks, and so a few of the lines, is a matter of time
        assert is_ended == (place in interrupt.seen), place
        interrupted |= {place[0]} if is_ended else set()
        report = mslsim.run(write(number % 2 + 7), "k", [y], 4, 4)
        assert report.ok and y.tolist() == [number % 2 + 7] * 4, place
    assert {"_start", "ask", "send", "wait"} <= interrupted


def test_an_interrupt_ends_a_run(monkeypatch: pytest.MonkeyPatch, ctrl_c: None) -> None:
    y, works = np.zeros(64, np.int32), isolated.worker()
    works.session.steps = 0
    look = process.select.select

    def interrupted(*args: Any) -> Any:
        if works.session.steps:  # it is at work
            signal.raise_signal(signal.SIGINT)
        return look(*args)

    monkeypatch.setattr(process.select, "select", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mslsim.run(SLOW, "k", [y], 64, 64)
    monkeypatch.undo()
    assert works._process is None and not y.any()


def test_a_loop_with_a_barrier_is_a_hang() -> None:
    text = HEAD + KERNEL + "{ while (true) threadgroup_barrier(mem_flags::mem_device); }"
    report = mslsim.run(text, "k", [np.zeros(4, np.int32)], 4, 4, timeout=0.2)
    assert [f.kind for f in report.findings] == ["hang"]


def test_a_compiler_without_an_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_SECONDS", 1)
    double = "".join(f"#define X{n + 1} X{n} X{n}\n" for n in range(30))
    text = f"{HEAD}#define X0 1 +\n{double}{KERNEL} {{ y[i] = X30 0; }}"
    report = mslsim.run(text, "k", [np.zeros(4, np.int32)], 4, 4)
    assert [f.message for f in report.findings] == [
        "compiling took longer than 1 seconds and was stopped"
    ]


FOREIGN = {
    'asm volatile("nop");': "inline assembly is not allowed in Metal",
    "y[i] = system(0);": "system: declared, but neither defined nor part of Metal",
    "y[i] = environ != 0;": "environ: declared, but neither defined nor part of Metal",
}


@pytest.mark.parametrize("body", FOREIGN)
def test_a_kernel_calls_only_metal(body: str) -> None:
    declared = 'int system(constant char*);\nextern "C" { extern constant char* environ; }\n'
    text = f"{HEAD}{declared}{KERNEL} {{ {body} }}"
    report = mslsim.run(text, "k", [np.zeros(4, np.int32)], 4, 4)
    assert [(f.kind, f.message) for f in report.findings] == [("strict", FOREIGN[body])]


@pytest.mark.parametrize(
    "line",
    [
        "__attribute__((constructor)) void f() {}",
        '#include "/etc/hostname"',
        '#embed "x.bin"',
        '#if __has_include("/etc/hostname")\n#endif',
    ],
)
def test_nothing_runs_or_is_read_beside_a_kernel(line: str) -> None:
    findings = mslsim.lint(f"{line}\n{write(1)}")
    assert findings and findings[0].kind in ("strict", "compile")


BASE = 'kernel = "k"\nthreads = 4\ngroup_size = [4]\n'
ARGUMENT = BASE + "[[arguments]]\n"
BAD = {
    "kernel = 3 =": "Expected newline",
    'kernel = "k"': "threads, group_size must be given",
    BASE + 'check = "none"': "unknown key 'check'; did you mean checks?",
    BASE.replace("4\n", '"4"\n'): "threads must be one to three numbers, got 4",
    ARGUMENT + 'shape = [4]\ndtype = "O"': "unknown dtype 'O'",
    ARGUMENT + 'shape = [4]\nfill = "one"': "unknown fill 'one'; did you mean ones?",
    ARGUMENT + 'shape = [4]\nname = "../../x"': "the name of an argument must be a word",
    ARGUMENT + 'npy = "absent.npy"': "No such file",
    ARGUMENT + "size = 4": "unknown key of an argument 'size'",
    BASE.replace('"k"', '"other"'): "no kernel 'other'; there are ['k']",
    BASE.replace("threads = 4", "threads = 4294967328") + "[[arguments]]\nshape = [4]": (
        "error: the grid has at most 4294967295 threads"
    ),
}


@pytest.mark.parametrize("spec", BAD, ids=list(BAD.values()))
def test_a_bad_launch_file_is_told_in_a_line(tmp_path: Path, spec: str) -> None:
    kernel, launch = tmp_path / "k.metal", tmp_path / "k.toml"
    kernel.write_text(write(1))
    launch.write_text(spec)
    result = CliRunner().invoke(app, ["check", str(kernel), "--spec", str(launch)])
    assert result.exit_code in (1, 2)
    assert BAD[spec] in result.output
    assert len(result.output.strip().splitlines()) <= 2


def test_a_death_while_a_library_is_loaded_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise process.Died(False, "out of memory")

    monkeypatch.setattr(isolated.worker(), "table", die)
    (finding,) = mslsim.run(write(1), "k", [np.zeros(4, np.int32)], 4, 4).findings
    assert finding.kind == "crash" and finding.message.endswith("died: out of memory")


def test_names_of_buffers_are_printed_as_they_are(tmp_path: Path) -> None:
    tmp_path = tmp_path / "of [" / "bold]"  # which together would be markup
    tmp_path.mkdir(parents=True)
    kernel, launch = tmp_path / "k.metal", tmp_path / "k.toml"
    kernel.write_text(write(1).replace("y,", "y [[buffer(0)]],"))
    launch.write_text(ARGUMENT + 'shape = [2]\ndtype = "int32"\nfill = "none"')
    result = CliRunner().invoke(app, ["check", str(kernel), "--spec", str(launch)])
    assert result.exit_code == 1 and "y [[buffer(0)]]" in result.output
    assert result.output.startswith(f"{kernel}:3:")


def test_a_source_that_is_no_text(tmp_path: Path) -> None:
    kernel = tmp_path / "k.metal"
    kernel.write_bytes(b"\xff\xfe\x00")
    result = CliRunner().invoke(app, ["lint", str(kernel)])
    assert (result.exit_code, result.output) == (2, f"mslsim: {kernel}: must be UTF-8 text\n")
    kernel.write_text("\ufeff" + write(1), encoding="utf-8")
    assert CliRunner().invoke(app, ["lint", str(kernel)]).exit_code == 0


def test_bfloat_arguments_in_a_launch_file(tmp_path: Path) -> None:
    kernel, launch = tmp_path / "k.metal", tmp_path / "k.toml"
    kernel.write_text(
        f"{HEAD}kernel void k(device const bfloat* x, constant bfloat& a, device float* y,"
        " uint i [[thread_position_in_grid]]) { y[i] = float(x[i]) * float(a); }"
    )
    launch.write_text(
        ARGUMENT + 'shape = [4]\ndtype = "bfloat16"\nfill = "range"\n'
        '[[arguments]]\nvalue = 1.5\ntype = "bfloat16"\n'
        '[[arguments]]\nshape = [4]\nfill = "none"\nname = "y"\n'
    )
    command = ["run", str(kernel), "--spec", str(launch), "-o", str(tmp_path)]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert np.load(tmp_path / "y.npy").tolist() == [0.0, 1.5, 3.0, 4.5]


def test_arrays_of_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="argument 0 must hold numbers"):
        mslsim.run(write(1), "k", [np.array([None])], 4, 4)
