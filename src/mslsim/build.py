# SPDX-License-Identifier: MIT
"""Builds kernel libraries and keeps them on disk, keyed by everything that went into them."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import swizzles
from .cache import digest, entry
from .compiler import PACKAGE, CommandFailed, included, toolchain
from .contract import fuse_all
from .foreign import foreign
from .frontend.parse import Parsed, Source, diagnostics, parse, write_stand_ins
from .frontend.rewrite import symbol, threadgroup_arrays
from .frontend.structs import find_structs
from .report import CompileError, Finding
from .sites import Site, add_sites, blocking_functions
from .slots import Counted, count_blocks
from .text.kernels import Kernel
from .text.tokens import SyntaxProblem
from .text.unsimulated import NOT_SIMULATED

# From this many kernels on, each is built when it is first asked for.
BUILD_ALL_UP_TO = 64
_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


@dataclass(slots=True)
class Index:
    """What the front end learned of a source: enough to launch it once it is built."""

    kernels: dict[str, dict[str, Any]]
    findings: list[Finding]
    dependencies: dict[str, str]
    structs: dict[str, list[tuple[str, str, int]]]


@dataclass(slots=True)
class Build:
    """A library on disk. `whole_groups` are the kernels that run a threadgroup in one loop."""

    library: Path
    sites: list[Site]
    findings: list[Finding]
    whole_groups: set[str]
    synchronised: set[str]
    # Name and type of threadgroup variables, by slot.
    threadgroup_arrays: dict[int, tuple[str, str]]


@lru_cache(maxsize=1)
def _shim() -> dict[str, str]:
    """The texts of the headers in front of every kernel, by name."""
    files = included(PACKAGE / "machine" / "metal_stdlib.h")
    texts = {file.name: file.read_text() for file in files}
    made = {"swizzles.h": swizzles.header(), "packed_swizzles.h": swizzles.packed_header()}
    return texts | made


@lru_cache(maxsize=1)
def _makers() -> str:
    """Changes when the code does that makes libraries out of sources."""
    files = [
        PACKAGE / "build.py",
        PACKAGE / "contract.py",
        PACKAGE / "sites.py",
        *sorted((PACKAGE / "frontend").glob("*.py")),
        *sorted((PACKAGE / "text").glob("*.py")),
    ]
    return digest(*(file.read_bytes() for file in files))


@lru_cache(maxsize=1)
def _counters() -> str:
    """Changes when the code does that puts counters into kernels."""
    makers = ("classes.py", "shared.py", "slots.py", "ssa.py", "values.py")
    return digest(*((PACKAGE / name).read_bytes() for name in makers))


def headers() -> Path:
    """Folder with the machine's headers for kernels, and in metal/ stand-ins for Metal's own."""

    def fill(target: Path) -> None:
        write_stand_ins(target / "metal")
        for name, text in _shim().items():
            (target / name).write_text(text)

    return entry(f"headers-{digest(repr(_shim()), _makers())}", fill)


def _precompiled_headers(checked: bool) -> Path:
    """The machine's headers as the compiler keeps them in memory."""
    tools, folder = toolchain(), headers()

    def fill(target: Path) -> None:
        tools.precompile(folder / "metal_stdlib.h", target / "machine.pch", checked)

    # It holds the place of the headers.
    return entry(f"precompiled-{digest(str(folder), tools.recipe(checked))}", fill) / "machine.pch"


def machine_library(checked: bool) -> Path:
    """The machine itself as a shared library."""
    tools = toolchain()
    source = PACKAGE / "machine" / "machine.cpp"

    def fill(target: Path) -> None:
        tools.compile_machine(source, target / "machine.o", checked)
        tools.link([target / "machine.o"], target / f"machine{_SUFFIX}")
        (target / "machine.o").unlink()

    texts = [file.read_bytes() for file in included(source)]
    key = digest(tools.recipe(checked), str(checked), *texts)
    return entry(f"machine-{key}", fill) / f"machine{_SUFFIX}"


class Builder:
    """Builds the kernels of one source, all at once or one by one."""

    def __init__(self, source: Source, checked: bool) -> None:
        self.source = source
        self.checked = checked
        self.tools = toolchain()
        self._parsed: Parsed | None = None
        self._headers = headers()
        shim = repr(_shim())
        self.key = digest(_makers(), shim, self.tools.recipe(checked), source.describe())
        self.index = self._read_index()

    def _read_index(self) -> Index:
        def fill(target: Path) -> None:
            (target / "index.json").write_text(json.dumps(asdict(self._new_index())))

        folder = entry(f"source-{self.key}", fill, _dependencies_are_unchanged)
        return _index(folder)

    def _new_index(self) -> Index:
        parsed = self.parsed()
        tokens, definitions = parsed.stream.tokens, parsed.found.definitions
        defined = {name: tokens[d.name] for name, d in definitions.items()}
        kernels = {
            k.name: {
                "file": k.file,
                "line": k.line,
                "defined": (defined[k.function].file, defined[k.function].line),
                "parameters": [asdict(p) for p in k.parameters if p.kind != "position"],
            }
            for k in parsed.kernels
        }
        return Index(kernels, parsed.findings, parsed.dependencies, find_structs(parsed.stream))

    def parsed(self) -> Parsed:
        if self._parsed is None:
            self._parsed = parse(self.source, self.tools, self._headers / "metal")
        return self._parsed

    def build(
        self,
        kernel: str,
        alone: bool = False,
        style: str = "inlined",
        together: Collection[str] = (),
    ) -> Build:
        """The library that holds `kernel`, with those named in `together`, or all others unless
        they are many, or it is to be `alone`."""
        few = len(self.index.kernels) <= BUILD_ALL_UP_TO and not together
        names = [kernel]
        if not alone and (few or kernel in together):
            names = sorted(together or self.index.kernels)
        try:
            folder = self._built(names, False, style)
        except CompileError:
            # What is wrong with another kernel is no matter of this one.
            if len(self.index.kernels) < 2:
                raise
            folder = self._built([kernel], True, style)
        data = json.loads((folder / "build.json").read_text())
        return Build(
            folder / f"kernels{_SUFFIX}",
            [Site(s[0], s[1], s[2], tuple((f, n) for f, n in s[3])) for s in data["sites"]],
            _findings(data["findings"]),
            set(data["whole_groups"]),
            set(data["synchronised"]),
            {int(slot): (name, kind) for slot, name, kind in data["threadgroup_arrays"]},
        )

    def _built(self, names: list[str], apart: bool, style: str) -> Path:
        precompiled = self._precompiled()

        def fill(target: Path) -> None:
            chosen = [k for k in self.parsed().kernels if k.name in names]
            self._compile(target, chosen, precompiled, apart, style)

        recipe = self.tools.recipe(self.checked, style)
        return entry(f"kernels-{self._digest(*names, 'apart' if apart else '', recipe)}", fill)

    def counted(self, kernel: str) -> tuple[Path, list[list[Counted]]]:
        """A library with `kernel` alone, which counts how often its blocks run, and what is in
        them. It needs no checks."""
        precompiled = self._precompiled()

        def fill(target: Path) -> None:
            parsed = self.parsed()
            chosen = [k for k in parsed.kernels if k.name == kernel]
            # One function for each thread, as in checked libraries: a loop over threads would
            # share work among them.
            self._to_ir(target, parsed.to_cpp(chosen, True), precompiled, "counted")
            ir, own = target / "kernels.ll", str(self._headers)
            text = add_sites(ir.read_text(), parsed.files, own)[0]
            text, blocks = count_blocks(text, chosen[0], parsed.files, own)
            ir.write_text(text)
            self.tools.to_object(ir, target / "kernels.o")
            self.tools.link([target / "kernels.o"], target / f"kernels{_SUFFIX}")
            known = [[(c.place, c.name, c.count) for c in block] for block in blocks]
            (target / "blocks.json").write_text(json.dumps(known))
            for name in ("kernels.cpp", "kernels.ll", "kernels.o"):
                (target / name).unlink()

        recipe = self.tools.recipe(False, "counted")
        folder = entry(f"counted-{self._digest(recipe, _counters(), kernel)}", fill)
        blocks = [
            [Counted(tuple((f, n) for f, n in place), name, n) for place, name, n in block]
            for block in json.loads((folder / "blocks.json").read_text())
        ]
        return folder / f"kernels{_SUFFIX}", blocks

    def errors(self) -> list[Finding]:
        """What the compiler has against any of its kernels; nothing is built."""

        def look(precompiled: Path) -> list[Finding]:
            parsed = self.parsed()
            refused = [_refused(k) for k in parsed.kernels if k.refusal]
            taken = [k for k in parsed.kernels if not k.refusal]
            try:
                cpp = self._cpp(parsed, taken, apart=bool(refused))
                self._ir_of(cpp, precompiled, "unoptimised")
            except CompileError as error:
                found = [
                    replace(f, kernel=parsed.kernel_at(f.file, f.line)) for f in error.findings
                ]
                beyond = {f.kernel for f in found if NOT_SIMULATED in f.message}
                # what else is wrong with such a kernel follows from it
                refused += [
                    f for f in found if f.kernel not in beyond or NOT_SIMULATED in f.message
                ]
            return refused

        return self.findings("errors", self.tools.recipe(self.checked, "unoptimised"), look)

    def findings(self, name: str, key: str, look: Callable[[Path], list[Finding]]) -> list[Finding]:
        """What `look` finds in this source, kept on disk under `name` and `key`."""
        precompiled = self._precompiled()
        return _findings(self.kept(name, key, lambda: [asdict(f) for f in look(precompiled)]))

    def kept(self, name: str, key: str, make: Callable[[], Any]) -> Any:
        """What `make` tells of this source, as JSON has it, kept on disk under `name` and `key`."""
        self._headers = headers()

        def fill(target: Path) -> None:
            (target / "kept.json").write_text(json.dumps(make()))

        folder = entry(f"{name}-{self._digest(key)}", fill)
        return json.loads((folder / "kept.json").read_text())

    @property
    def own_headers(self) -> str:
        """Folder of the machine's headers, whose lines are not the kernel's."""
        return str(self._headers)

    def _precompiled(self) -> Path:
        """What its kernels are compiled with; to be asked for before an entry is made of them."""
        self._headers = headers()
        return _precompiled_headers(self.checked)

    def _digest(self, *parts: str) -> str:
        """A key for what is made of this source, and of the files it includes."""
        return digest(self.key, repr(sorted(self.index.dependencies.items())), *parts)

    def _cpp(
        self,
        parsed: Parsed,
        kernels: list[Kernel],
        each_thread: bool = False,
        apart: bool = False,
    ) -> str:
        if refused := [_refused(k) for k in kernels if k.refusal]:
            raise CompileError(refused)
        try:
            return parsed.to_cpp(kernels, self.checked or each_thread, apart)
        except SyntaxProblem as problem:
            place = (problem.token.file, problem.token.line)
            raise CompileError([Finding("compile", str(problem), "", *place)]) from None

    def gpu_intermediate(self, kernels: list[Kernel]) -> str:
        """LLVM IR of `kernels` as a GPU's compiler has it: one function of each, for a thread."""
        cpp = self._cpp(self.parsed(), kernels, each_thread=True)
        return self._ir_of(cpp, self._headers / "metal_stdlib.h", "gpu")

    def cpp_of(self, kernel: Kernel) -> tuple[str, str]:
        """The machine's headers, and one kernel's C++ after them, for a thread."""
        include = '#include "metal_stdlib.h"\n'
        machine = self.tools.preprocess(include, "machine", ["-I", str(self._headers), "-dD"])
        return machine, self._cpp(self.parsed(), [kernel], each_thread=True)

    def _ir_of(self, cpp: str, header: Path, style: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            self._to_ir(Path(folder), cpp, header, style)
            return (Path(folder) / "kernels.ll").read_text()

    def _to_ir(self, folder: Path, cpp: str, precompiled: Path, style: str = "inlined") -> str:
        """Writes kernels.cpp and kernels.ll; returns the warnings."""
        source = folder / "kernels.cpp"
        # Up to a pragma of the source's own.
        source.write_text(f"#pragma clang fp contract({self.source.contract})\n{cpp}")
        target = folder / "kernels.ll"
        try:
            return self.tools.to_intermediate(source, target, precompiled, self.checked, style)
        except CommandFailed as failure:
            own = (str(source), str(self._headers))
            raise CompileError(_own_names(diagnostics(failure.text), own)) from None

    def _compile(
        self, folder: Path, kernels: list[Kernel], precompiled: Path, apart: bool, style: str
    ) -> None:
        parsed = self.parsed()
        ir = folder / "kernels.ll"
        while True:
            cpp = self._cpp(parsed, kernels, apart=apart)
            said = self._to_ir(folder, cpp, precompiled, style)
            text = ir.read_text()
            blocking = blocking_functions(text)
            late = {
                k.name
                for k in kernels
                if k.name not in parsed.synchronised and f"msl_group_{symbol(k.name)}" in blocking
            }
            if not late:
                break
            parsed.synchronised |= late
        if self.source.strict and (unknown := foreign(text, _shim()["math.h"])):
            message = f"{', '.join(unknown)}: declared, but neither defined nor part of Metal"
            raise CompileError([Finding("strict", message)])
        text, sites = add_sites(text, parsed.files, str(self._headers))
        ir.write_text(fuse_all(text) if self.source.contract == "fast" else text)
        self.tools.to_object(ir, folder / "kernels.o")
        self.tools.link([folder / "kernels.o"], folder / f"kernels{_SUFFIX}")
        warnings = [f for f in diagnostics(said) if f.kind == "uninitialized"] if said else []
        threads = {k.name for k in kernels if f"msl_thread_{symbol(k.name)}" in blocking}
        whole = {k.name for k in kernels if k.name not in parsed.synchronised}
        known = {
            "sites": [[s.file, s.line, s.column, s.calls] for s in sites],
            "findings": [asdict(f) for f in warnings],
            "whole_groups": sorted(whole if not self.checked else ()),
            "synchronised": sorted(threads),
            "threadgroup_arrays": threadgroup_arrays(cpp),
        }
        (folder / "build.json").write_text(json.dumps(known))
        if not os.environ.get("MSLSIM_KEEP"):
            for name in ("kernels.cpp", "kernels.ll", "kernels.o"):
                (folder / name).unlink()


def _refused(kernel: Kernel) -> Finding:
    return Finding("compile", kernel.refusal, kernel.name, kernel.file, kernel.line)


def _own_names(findings: list[Finding], own: tuple[str, ...]) -> list[Finding]:
    """Errors inside the machine's headers are reported without a place of their own."""
    return [f if not f.file.startswith(own) else Finding(f.kind, f.message) for f in findings]


def _findings(data: list[dict[str, Any]]) -> list[Finding]:
    return [Finding(**{**d, "threads": tuple(d["threads"])}) for d in data]


def _index(folder: Path) -> Index:
    data = json.loads((folder / "index.json").read_text())
    findings = _findings(data["findings"])
    return Index(data["kernels"], findings, data["dependencies"], data["structs"])


def _dependencies_are_unchanged(folder: Path) -> bool:
    """Whether the files that a source includes are what they were."""
    return all(
        Path(file).is_file() and hashlib.sha256(Path(file).read_bytes()).hexdigest() == known
        for file, known in _index(folder).dependencies.items()
    )
