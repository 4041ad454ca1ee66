# SPDX-License-Identifier: MIT
"""Builds kernel libraries and keeps them on disk, keyed by everything that went into them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import swizzles
from .compiler import (
    PACKAGE,
    CommandFailed,
    cache_directory,
    package_digest,
    toolchain,
)
from .frontend.kernels import Kernel
from .frontend.parse import Parsed, Source, diagnostics, parse, write_stand_ins
from .frontend.rewrite import symbol, threadgroup_names
from .frontend.tokens import SyntaxProblem
from .report import CompileError, Finding
from .sites import Site, add_sites

# From this many kernels on, each is built when it is first asked for.
BUILD_ALL_UP_TO = 12
_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
_BLOCKING = ("msl_threadgroup_barrier", "msl_collective", "msl_threadgroup_memory", "msl_lane")


@dataclass(slots=True)
class Index:
    """What the front end learned of a source: enough to launch it once it is built."""

    kernels: dict[str, dict[str, Any]]
    findings: list[Finding]
    dependencies: dict[str, str]


@dataclass(slots=True)
class Build:
    """A library on disk. `whole_groups` are the kernels that run a threadgroup in one loop."""

    library: Path
    sites: list[Site]
    findings: list[Finding]
    whole_groups: set[str]
    synchronised: set[str]
    threadgroup_names: dict[int, str]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def machine_headers() -> Path:
    """Folder with the generated header and the stand-ins for Metal's own."""
    folder = cache_directory() / f"include-{package_digest()[:16]}"
    if not folder.is_dir():

        def fill(target: Path) -> None:
            write_stand_ins(target / "metal")
            (target / "swizzles.h").write_text(swizzles.header())

        _make(folder, fill)
    return folder


def machine_library(checked: bool) -> Path:
    """The machine itself as a shared library."""
    tools = toolchain()
    name = "checked" if checked else "fast"
    folder = cache_directory() / f"machine-{name}-{_digest(package_digest(), tools.identity)}"

    def fill(target: Path) -> None:
        flags = ["-DMSL_CHECKED"] if checked else []
        tools.to_object(PACKAGE / "machine" / "machine.cpp", target / "machine.o", flags)
        tools.link([target / "machine.o"], target / f"machine{_SUFFIX}")

    if not folder.is_dir():
        _make(folder, fill)
    return folder / f"machine{_SUFFIX}"


def _make(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fills a new folder and puts it in place at once, so that no one sees half of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="making-", dir=folder.parent))
    try:
        fill(work)
        work.rename(folder)
    except OSError:
        # Another process was faster.
        if not folder.is_dir():
            raise
    finally:
        if work.is_dir():
            shutil.rmtree(work)


class Builder:
    """Builds the kernels of one source, all at once or one by one."""

    def __init__(self, source: Source, checked: bool) -> None:
        self.source = source
        self.checked = checked
        self.tools = toolchain()
        self._parsed: Parsed | None = None
        mode = "checked" if checked else "fast"
        self.key = _digest(package_digest(), self.tools.identity, mode, source.describe())
        self.index = self._read_index() or self._write_index()

    def _index_path(self) -> Path:
        return cache_directory() / self.key / "index.json"

    def _read_index(self) -> Index | None:
        path = self._index_path()
        if not path.is_file():
            return None
        data = json.loads(path.read_text())
        for file, digest in data["dependencies"].items():
            try:
                content = Path(file).read_bytes()
            except OSError:
                return None
            if hashlib.sha256(content).hexdigest() != digest:
                return None
        return Index(data["kernels"], _findings(data["findings"]), data["dependencies"])

    def _write_index(self) -> Index:
        parsed = self.parsed()
        kernels = {
            k.name: {
                "file": k.file,
                "line": k.line,
                "parameters": [asdict(p) for p in k.parameters if p.kind != "position"],
            }
            for k in parsed.kernels
        }
        index = Index(kernels, parsed.findings, parsed.dependencies)
        _write_json(
            self._index_path(),
            {
                "kernels": kernels,
                "findings": [asdict(f) for f in index.findings],
                "dependencies": index.dependencies,
            },
        )
        return index

    def parsed(self) -> Parsed:
        if self._parsed is None:
            self._parsed = parse(self.source, self.tools, machine_headers() / "metal")
        return self._parsed

    def build(self, kernel: str) -> Build:
        """The library that holds `kernel`."""
        together = len(self.index.kernels) <= BUILD_ALL_UP_TO
        names = sorted(self.index.kernels) if together else [kernel]
        contents = _digest(
            *names, *(f"{f}={d}" for f, d in sorted(self.index.dependencies.items()))
        )
        folder = cache_directory() / self.key / contents
        if not (folder / "build.json").is_file():
            chosen = [k for k in self.parsed().kernels if k.name in names]
            _make(folder, lambda target: self._compile(target, chosen))
        data = json.loads((folder / "build.json").read_text())
        return Build(
            folder / f"kernels{_SUFFIX}",
            [Site(s[0], s[1], s[2], tuple((f, n) for f, n in s[3])) for s in data["sites"]],
            _findings(data["findings"]),
            set(data["whole_groups"]),
            set(data["synchronised"]),
            {int(slot): name for slot, name in data["threadgroup_names"].items()},
        )

    def _cpp(self, parsed: Parsed, kernels: list[Kernel]) -> str:
        try:
            return parsed.to_cpp(kernels, self.checked)
        except SyntaxProblem as problem:
            place = (problem.token.file, problem.token.line)
            raise CompileError([Finding("compile", str(problem), "", *place)]) from None

    def intermediate(self, folder: Path) -> str:
        """LLVM IR of all kernels, each in one function."""
        self._to_ir(folder, self._cpp(self.parsed(), self.parsed().kernels), whole=True)
        return (folder / "kernels.ll").read_text()

    def _to_ir(self, folder: Path, cpp: str, whole: bool = False) -> str:
        """Writes kernels.cpp and kernels.ll; returns the warnings."""
        source = folder / "kernels.cpp"
        source.write_text(cpp)
        (folder / "swizzles.h").write_bytes((machine_headers() / "swizzles.h").read_bytes())
        try:
            return self.tools.to_intermediate(source, folder / "kernels.ll", self.checked, whole)
        except CommandFailed as failure:
            raise CompileError(_own_names(diagnostics(failure.text), str(source))) from None

    def _compile(self, folder: Path, kernels: list[Kernel]) -> None:
        parsed = self.parsed()
        ir = folder / "kernels.ll"
        while True:
            cpp = self._cpp(parsed, kernels)
            said = self._to_ir(folder, cpp)
            text = ir.read_text()
            blocking = _blocking_functions(text)
            late = {
                k.name
                for k in kernels
                if k.name not in parsed.synchronised and f"msl_group_{symbol(k.name)}" in blocking
            }
            if not late:
                break
            parsed.synchronised |= late
        text, sites = add_sites(text)
        ir.write_text(text)
        self.tools.to_object(ir, folder / "kernels.o")
        self.tools.link([folder / "kernels.o"], folder / f"kernels{_SUFFIX}")
        warnings = [f for f in diagnostics(said) if f.kind == "uninitialized"] if said else []
        threads = {k.name for k in kernels if f"msl_thread_{symbol(k.name)}" in blocking}
        whole = {k.name for k in kernels if k.name not in parsed.synchronised}
        _write_json(
            folder / "build.json",
            {
                "sites": [[s.file, s.line, s.column, s.calls] for s in sites],
                "findings": [asdict(f) for f in warnings],
                "whole_groups": sorted(whole if not self.checked else ()),
                "synchronised": sorted(threads),
                "threadgroup_names": threadgroup_names(cpp),
            },
        )
        if not os.environ.get("MSLSIM_KEEP"):
            for name in ("kernels.cpp", "kernels.ll", "kernels.o", "swizzles.h"):
                (folder / name).unlink()


def _blocking_functions(ir: str) -> set[str]:
    """Functions of the module from which a call that can block is reached."""
    calls: dict[str, set[str]] = {}
    current = ""
    for line in ir.splitlines():
        if line.startswith("define"):
            match = re.search(r"@([\w.$]+|\"[^\"]+\")\(", line)
            current = match[1] if match else ""
            calls[current] = set()
        elif "call " in line and current:
            calls[current].update(re.findall(r"@([\w.$]+)\(", line))
    blocking = set(_BLOCKING)
    changed = True
    while changed:
        more = {f for f, called in calls.items() if f not in blocking and called & blocking}
        blocking |= more
        changed = bool(more)
    return blocking


def _own_names(findings: list[Finding], path: str) -> list[Finding]:
    """Errors inside the machine's headers are reported without a place of their own."""
    return [
        f if f.file != path and str(PACKAGE) not in f.file else Finding(f.kind, f.message)
        for f in findings
    ]


def _findings(data: list[dict[str, Any]]) -> list[Finding]:
    return [Finding(**{**d, "threads": tuple(d["threads"])}) for d in data]


def _write_json(path: Path, data: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(data))
    temporary.replace(path)
