# SPDX-License-Identifier: MIT
"""Results on disk: made once, keyed by what changes them, repaired, and kept to a size."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mslsim
from mslsim import build, cache, compiler
from mslsim.frontend.parse import Source

TEXT = (
    "kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = 1; }"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MSLSIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Commands:
    """Counts what is asked of the compiler: the preprocessor's runs, and libraries linked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        execute = compiler._execute

        def counting(command: list[str], stdin: str | None = None) -> tuple[str, str]:
            kinds = {"-E": "preprocess", "c++-header": "precompile", "-emit-llvm": "compile"}
            self.seen += [kind for flag, kind in kinds.items() if flag in command]
            return execute(command, stdin)

        monkeypatch.setattr(compiler, "_execute", counting)

    def take(self) -> list[str]:
        taken, self.seen = self.seen, []
        return taken


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    counted = Commands(monkeypatch)
    built(TEXT.replace("1", "0"))  # the machine's own parts
    counted.take()
    return counted


def test_the_folder_is_private(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    made = built()
    assert [p.stat().st_mode & 0o777 for p in (folder, made.parent)] == [0o700, 0o700]


def built(text: str = TEXT, checked: bool = True, **options: Any) -> Path:
    return build.Builder(Source(text, **options), checked).build("k").library


def test_the_same_source_is_compiled_once(commands: Commands) -> None:
    first = built()
    assert commands.take() == ["preprocess", "compile"]
    assert built() == first
    assert commands.take() == []


def test_what_changes_the_result_changes_the_key(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = {
        built(),
        built(checked=False),
        built(TEXT + " "),
        built(name="other.metal"),
        built(defines={"x": "y"}),
        built(constants={0: 1}),
        built(version=310),
        built(strict=False),
    }
    monkeypatch.setattr(compiler, "_CHECKED", [*compiler._CHECKED, "-fwrapv"])
    libraries.add(built())
    assert len(libraries) == 9


def test_what_does_not_change_the_result_does_not(
    commands: Commands, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = built()
    commands.take()
    monkeypatch.setattr(compiler, "_GPU", [*compiler._GPU, "-fwrapv"])
    monkeypatch.chdir(folder)
    assert built() == first
    assert commands.take() == []


def test_a_copy_of_the_package_finds_the_same_entries(folder: Path, tmp_path: Path) -> None:
    first = built()
    entries = sorted(folder.iterdir())
    shutil.copytree(build.PACKAGE, tmp_path / "copy" / "mslsim", copy_function=shutil.copyfile)
    program = (
        "from mslsim import build\n"
        "from mslsim.frontend.parse import Source\n"
        f"print(build.PACKAGE, build.Builder(Source({TEXT!r}), True).build('k').library)"
    )
    # without site, whose hooks for an editable install would find the original
    folders = (tmp_path / "copy", Path(np.__file__).parent.parent)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-S", "-c", program]
    shown = subprocess.run(command, env=env, capture_output=True, text=True)
    assert shown.stdout == f"{tmp_path / 'copy' / 'mslsim'} {first}\n", shown.stderr
    assert sorted(folder.iterdir()) == entries


def test_headers_of_the_machine_are_part_of_the_key(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = built()
    commands.take()
    changed = build._shim() | {"abi.h": build._shim()["abi.h"] + "// changed\n"}
    monkeypatch.setattr(build, "_shim", lambda: changed)
    assert built() != first
    assert commands.take() == ["preprocess", "precompile", "compile"]


def test_an_included_file_is_part_of_the_key(commands: Commands, tmp_path: Path) -> None:
    text = f'#include "value.h"\n{TEXT.replace("= 1", "= VALUE")}'
    header = tmp_path / "value.h"
    header.write_text("#define VALUE 2\nint used();\n")
    first = built(text, include=[str(tmp_path)])
    header.write_text("#define VALUE 3\nint used();\n")
    second = built(text, include=[str(tmp_path)])
    assert first != second
    header.write_text("#define VALUE 2\nint used();\n")
    commands.take()
    assert built(text, include=[str(tmp_path)]) == first
    assert commands.take() == ["preprocess"]


def test_the_machines_headers_are_read_once(commands: Commands) -> None:
    for number in range(3):
        built(TEXT.replace("1", str(number + 2)))
    assert commands.take() == ["preprocess", "compile"] * 3


def test_two_processes_make_an_entry_once(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from mslsim.cache import entry\n"
        "def fill(folder):\n"
        "    with open(sys.argv[1], 'a') as log: log.write('made\\n')\n"
        "    time.sleep(0.5)\n"
        "    (folder / 'result').write_text('whole')\n"
        "print((entry('shared', fill) / 'result').read_text())\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "log")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0] for process in running] == ["whole\n"] * 3
    assert (tmp_path / "log").read_text() == "made\n"


def write(size: int) -> Any:
    return lambda target: (target / "data").write_bytes(b"x" * size)


@pytest.mark.parametrize(
    "harm", ["shorter", "changed", "gone", "no manifest", "not json", "a list"]
)
def test_a_damaged_entry_is_made_again(harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache.entry("e", write(100))
    data, manifest = folder / "data", folder / "manifest.json"
    if harm in ("shorter", "changed"):
        data.write_bytes(b"x" * 50 if harm == "shorter" else b"y" * 100)
    elif harm == "gone":
        data.unlink()
    elif harm == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text("{" if harm == "not json" else "[]")
    monkeypatch.setattr(cache, "_unharmed", set())  # as another process would find it
    assert (cache.entry("e", write(100)) / "data").read_bytes() == b"x" * 100


def test_a_damaged_library_is_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    library = built()
    library.write_bytes(library.read_bytes()[:100])
    monkeypatch.setattr(cache, "_unharmed", set())
    x = np.zeros(4, np.float32)
    mslsim.compile_shader(TEXT).k(x, threads=4)
    assert x.tolist() == [1, 1, 1, 1]


def test_what_fails_leaves_nothing(folder: Path) -> None:
    def fill(target: Path) -> None:
        (target / "half").write_text("")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cache.entry("e", fill)
    assert [child.name for child in folder.iterdir()] == ["locks"]


def age(folder: Path, seconds: float) -> None:
    os.utime(folder / "manifest.json", (time.time() - seconds,) * 2)
    os.utime(folder / "data", (time.time() - seconds,) * 2)
    os.utime(folder, (time.time() - seconds,) * 2)


def test_what_was_used_longest_ago_goes_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        age(cache.entry(f"e{number}", write(50_000)), seconds=10_000 - number)
    cache.entry("e0", write(0))
    monkeypatch.setenv("MSLSIM_CACHE_BYTES", "170000")
    cache.trim()
    assert sorted(child.name for child in folder.iterdir()) == ["e0", "e2", "e3", "locks"]
    monkeypatch.setenv("MSLSIM_CACHE_BYTES", "0")
    cache.trim()
    assert sorted(child.name for child in folder.iterdir()) == ["e0", "locks"]  # in use


def test_a_new_entry_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "TRIM_SECONDS", 0)
    monkeypatch.setenv("MSLSIM_CACHE_BYTES", "100000")
    age(cache.entry("old", write(90_000)), seconds=10_000)
    cache.entry("new", write(90_000))
    assert sorted(child.name for child in folder.iterdir()) == ["locks", "new"]


def test_others_may_remove_what_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.entry("kept", write(10))
    cache.entry("gone", write(10))
    walk = os.walk

    def removing(path: Path) -> Any:
        if path.name == "gone":
            cache._remove(path)
        return walk(path)

    monkeypatch.setattr(os, "walk", removing)
    cache.trim()
    assert sorted(child.name for child in folder.iterdir()) == ["kept", "locks"]


def test_the_limit_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.size_limit() == 1 << 30
    monkeypatch.setenv("MSLSIM_CACHE_BYTES", "1 GB")
    with pytest.raises(ValueError, match="must be a number of bytes, got '1 GB'"):
        cache.size_limit()


def test_a_kernel_that_was_thrown_out_is_built_again(folder: Path) -> None:
    library = mslsim.compile_shader(TEXT)
    x = np.zeros(4, np.float32)
    library.k(x, threads=4)
    for child in folder.iterdir():
        cache._remove(child)
    assert library.k._build().library.exists()
    library.k(x, threads=4)
    assert x.tolist() == [1, 1, 1, 1]
