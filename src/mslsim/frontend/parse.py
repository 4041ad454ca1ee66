# SPDX-License-Identifier: MIT
"""Metal source text to C++: preprocess, check, rewrite."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..compiler import CommandFailed, Toolchain
from ..report import CompileError, Finding
from ..text.kernels import Found, Kernel, find_kernels
from ..text.scopes import find_scopes, functions_reached, functions_reaching
from ..text.tokens import Stream, SyntaxProblem, tokenize
from .rewrite import Constants, Rewriter
from .strict import strictness

# Headers that the machine provides; a kernel source includes them by name.
_STANDARD = [
    "metal_stdlib", "metal_array", "metal_assert", "metal_atomic", "metal_command_buffer",
    "metal_common", "metal_compute", "metal_config", "metal_geometric", "metal_graphics",
    "metal_imageblocks", "metal_integer", "metal_interpolate", "metal_limits", "metal_logging",
    "metal_math", "metal_matrix", "metal_mesh", "metal_numeric", "metal_pack", "metal_quadgroup",
    "metal_raytracing", "metal_relational", "metal_simdgroup", "metal_simdgroup_matrix",
    "metal_tessellation", "metal_texture", "metal_type_traits", "metal_types", "metal_uniform",
    "metal_visible_function_table",
]  # fmt: skip
_MPP = "MetalPerformancePrimitives/MetalPerformancePrimitives.h"
# What they bring is in namespaces of its own, so that its names are free where they are not
# included.
_TENSORS = "namespace metal { using namespace msl_tensor; }\n"
_OPERATIONS = f"{_TENSORS}namespace mpp {{ using namespace msl_mpp; }}\n"
# What Apple's headers say of the platform, and of the layers that SwiftUI hands to a shader.
_TARGETS = "".join(
    f"#define TARGET_OS_{name} {int(name in ('MAC', 'OSX'))}\n"
    for name in ("MAC", "OSX", "IPHONE", "IOS", "MACCATALYST", "SIMULATOR", "TV", "VISION", "WATCH")
)
_LAYER = "struct Layer { metal::half4 sample(metal::float2) const { __builtin_trap(); } };"
_SWIFT_UI = f"#include <metal_stdlib>\nnamespace SwiftUI {{ {_LAYER} }}\n"
_FAR = re.compile(
    r'\s*#\s*(?:embed\b|(?:include|import)\s*[<"]\s*/|(?:el)?if\b.*__has_\w+\s*\(\s*[<"]\s*/)'
)
_DIAGNOSTIC = re.compile(r"^(.*?):(\d+):(\d+): (error|fatal error|warning): (.*)$")
_UNROLL = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+unroll\b(.*)$", re.MULTILINE)
_DEFINITION = re.compile(r"^#(?:define|undef) (\w+)(.*)$", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*")
_SYNCHRONISES = re.compile(r"^(simd_|quad_|simdgroup_|threadgroup_barrier$|__metal_simd_)")


@dataclass(slots=True)
class Source:
    """A kernel source and how to read it."""

    text: str
    name: str = "source.metal"
    include: Sequence[str] = ()
    defines: Mapping[str, str | int | float] = field(default_factory=dict)
    constants: Constants = field(default_factory=dict)
    version: int = 320
    strict: bool = True
    contract: str = "on"

    def line(self, file: str, number: int) -> str:
        """A line of the source, or of a file that it includes; empty where there is none."""
        path = Path(file)
        if file != self.name and not path.is_file():
            return ""
        lines = (self.text if file == self.name else path.read_text()).splitlines()
        return lines[number - 1] if 0 < number <= len(lines) else ""

    def describe(self) -> str:
        """Everything that decides the result, as text."""
        return repr(
            (
                self.text,
                self.name,
                list(self.include),
                sorted(self.defines.items()),
                sorted(self.constants.items()),
                self.version,
                self.strict,
                self.contract,
            )
        )


@dataclass(slots=True)
class Parsed:
    """A source after the front end, ready to be written out for some of its kernels."""

    stream: Stream
    found: Found
    findings: list[Finding]
    # Other files the text came from, with a digest of their contents.
    dependencies: dict[str, str]
    # Kernels that reach a barrier, a collective or threadgroup memory.
    synchronised: set[str]
    constants: Constants

    @property
    def kernels(self) -> list[Kernel]:
        return self.found.kernels

    @property
    def files(self) -> set[str]:
        return {token.file for token in self.stream.tokens}

    def to_cpp(self, kernels: list[Kernel], checked: bool, apart: bool = False) -> str:
        """C++ of `kernels`; `apart`, without what none of them reaches."""
        plain = {k.name for k in kernels if k.name not in self.synchronised}
        rewriter = Rewriter(self.stream, self.found, self.constants)
        ranges = self._unreached({k.function for k in kernels}) if apart else []
        return rewriter.run(kernels, set() if checked else plain, ranges)

    def _unreached(self, kernels: set[str]) -> list[tuple[int, int]]:
        """Where the other kernels are, and the functions that these do not reach."""
        s, overloads = self.stream, self.found.overloads
        others = [d for f in overloads.keys() - kernels for d in overloads[f]]
        ranges = [(d.begin, d.end + 1) for d in others]
        gone = [*self.found.left_out, *ranges]
        functions = find_scopes(s).functions
        reached = functions_reached(s, functions, kernels)
        ranges += [
            (s.statement_start(f.name_at), f.end + 1)
            for f in functions
            if not (f.in_type or f.is_template or f.name in reached)
            and not any(begin <= f.begin < end for begin, end in gone)
        ]
        return ranges

    def kernel_at(self, file: str, line: int) -> str:
        """The kernel whose definition has that line, if it is one kernel."""
        tokens, named = self.stream.tokens, set()
        for function, definitions in self.found.overloads.items():
            for d in definitions:
                first, last = tokens[d.begin], tokens[d.end]
                if first.file == file == last.file and first.line <= line <= last.line:
                    named |= {k.name for k in self.kernels if k.function == function}
        return named.pop() if len(named) == 1 else ""


def parse(source: Source, tools: Toolchain, stand_ins: Path) -> Parsed:
    """Reads `source`. Raises CompileError where it is not Metal at all."""
    flags = ["-I", str(stand_ins), f"-D__METAL_VERSION__={source.version}"]
    flags += ["-D__METAL__=1", "-D__METAL_MACOS__=1", "-D__HAVE_SIMDGROUP_MATRIX__=1"]
    flags += ["-D__HAVE_ATOMIC_FLOAT__=1", "-D__HAVE_SIMDGROUP_REDUCTION__=1", "-D__clang__=1"]
    flags += ["-D__HAVE_BFLOAT__=1"] if source.version >= 310 else []
    flags += ["-D__HAVE_TENSOR__=1"] if source.version >= 400 else []
    flags += [part for folder in source.include for part in ("-I", str(folder))]
    flags += [f"-D{name}={_macro(value)}" for name, value in source.defines.items()]
    try:
        text = tools.preprocess(source.text, source.name, flags)
        if names := {name for count in _UNROLL.findall(text) for name in _NAME.findall(count)}:
            text = tools.preprocess(source.text, source.name, [*flags, "-dD"])
            text = _with_macros(text, names)
    except CommandFailed as failure:
        raise CompileError(diagnostics(failure.text)) from None
    stream = Stream(tokenize(text))
    try:
        found = find_kernels(stream)
        findings = strictness(stream, found, source.version) if source.strict else []
        dependencies = _dependencies(stream, source.name, stand_ins)
        findings += _far_files(source, dependencies) if source.strict else []
    except SyntaxProblem as problem:
        place = (problem.token.file, problem.token.line)
        raise CompileError([Finding("compile", str(problem), "", *place)]) from None
    return Parsed(
        stream,
        found,
        findings,
        dependencies,
        _synchronised(stream, found),
        source.constants,
    )


def _far_files(source: Source, dependencies: Mapping[str, str]) -> list[Finding]:
    """Files outside of the folders that were given, and directives that read a file as data."""
    folders = [Path(f).resolve() for f in (*source.include, str(Path(source.name).parent))]
    findings = [
        Finding("strict", f"a kernel cannot read this file: {line.strip()}", "", name, n)
        for name in (source.name, *dependencies)
        for n, line in enumerate(_lines(source, name), 1)
        if _FAR.match(line)
    ]
    for file in dependencies:
        path = Path(file).resolve()
        if not any(folder in path.parents for folder in folders):
            message = f"a kernel cannot read this file, which is in no folder given: {file}"
            findings.append(Finding("strict", message, "", source.name, 1))
    return findings


def _lines(source: Source, name: str) -> list[str]:
    return (
        source.text if name == source.name else Path(name).read_text(errors="replace")
    ).splitlines()


def _with_macros(text: str, names: set[str]) -> str:
    """Preprocessed `text` that still defines the macros in `names`, and those that they use.

    The preprocessor leaves the counts of `#pragma unroll` as they are written.
    """
    bodies = _DEFINITION.findall(text)
    before = -1
    while len(names) != before:
        before = len(names)
        names = names.union(*(_NAME.findall(body) for name, body in bodies if name in names))
    return _DEFINITION.sub(lambda line: line[0] if line[1] in names else "", text)


def write_stand_ins(folder: Path) -> None:
    """Files for the standard headers: empty where the machine brings their contents."""
    texts = dict.fromkeys(_STANDARD, "")
    texts |= {"simd/simd.h": _simd_names(), "metal_tensor": _TENSORS, _MPP: _OPERATIONS}
    texts |= {"TargetConditionals.h": _TARGETS, "SwiftUI/SwiftUI_Metal.h": _SWIFT_UI}
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#pragma once\n" + text)


def _simd_names() -> str:
    """What <simd/simd.h> calls the types that a host program shares with its kernels."""
    numbers = ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "float")
    lines = []
    for number in numbers:
        own = [f"{number}{n}" for n in "234"]
        lines += [f"typedef {t} vector_{t}; typedef {t} simd_{t};" for t in own]
        lines += [f"typedef packed_{t} simd_packed_{t};" for t in own]
        lines.append(f"typedef {number} simd_{number}1;")
        lines.append(f"namespace simd {{ {' '.join(f'using ::{t};' for t in own)} }}")
    for number in ("half", "float"):
        own = [f"{number}{c}x{r}" for c in "234" for r in "234"]
        lines += [f"typedef {t} matrix_{t}; typedef {t} simd_{t};" for t in own]
        lines.append(f"namespace simd {{ {' '.join(f'using ::{t};' for t in own)} }}")
    return "\n".join(lines) + "\n"


def diagnostics(text: str) -> list[Finding]:
    """Compiler output as findings."""
    found = []
    for line in text.splitlines():
        match = _DIAGNOSTIC.match(line)
        if match:
            kind = "uninitialized" if match[4] == "warning" else "compile"
            place = (match[1], int(match[2]))
            message = _plain(match[5])
            found.append(Finding(kind, message, "", *place, column=int(match[3])))
    return found or [Finding("compile", text.strip() or "the compiler failed without a message")]


def _plain(message: str) -> str:
    """Metal's words for the machine's types, and no option names."""
    message = message.replace("_Float16", "half").replace("metal::msl_image::", "metal::")
    message = message.replace("metal::msl_tensor::", "metal::").replace("msl_mpp::", "mpp::")
    message = message.replace("metal::msl_unsimulated::", "metal::")
    return re.sub(r" \[-W[\w-]+\]$", "", message)


def _macro(value: str | int | float) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _dependencies(stream: Stream, name: str, stand_ins: Path) -> dict[str, str]:
    files = {token.file for token in stream.tokens} - {name, "?"}
    known = {}
    for file in files:
        path = Path(file)
        if stand_ins not in path.parents and path.is_file():
            known[file] = hashlib.sha256(path.read_bytes()).hexdigest()
    return known


def _synchronised(s: Stream, found: Found) -> set[str]:
    """Kernels from which a synchronising name seems to be reached, by the words of function
    bodies. The build confirms what is left out here."""
    reaching = functions_reaching(
        s,
        find_scopes(s).functions,
        lambda k: s[k] == "threadgroup" or _SYNCHRONISES.match(s[k]) is not None,
    )
    everyone = "operator" in reaching
    return {k.name for k in found.kernels if everyone or k.function in reaching}
