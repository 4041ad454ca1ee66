# SPDX-License-Identifier: MIT
"""The C++ compiler behind the simulator: the one in the ziglang package, or clang 19 or later."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .cache import FULL, cache_directory, digest

OLDEST_CLANG = 19
# A source that asks for more than this of the compiler is reported, not compiled.
MAX_SECONDS = 300
MAX_BYTES = 8 << 30
PACKAGE = Path(__file__).resolve().parent

_COMMON = [
    "-std=gnu++17",
    "-O2",
    "-fPIC",
    "-fdeclspec",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=on",
    "-fno-stack-protector",
    "-fomit-frame-pointer",
    "-fno-threadsafe-statics",
]
# Half is rounded after every operation, as on the GPU.
_KERNEL = [
    *_COMMON,
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-nostdinc",
    # A loop without an end is a finding, not undefined behaviour to be optimised away.
    "-fno-finite-loops",
    "-Wno-everything",
    "-Wuninitialized",
    "-Wsometimes-uninitialized",
]
_INLINED = ["-mllvm", "-inline-threshold=2000", "-gline-tables-only"]
# As a GPU's compiler has it: one function for each kernel, no vectors of its own making, and longer
# loops unrolled than for a CPU. With the names of variables. The target is no CPU, so that it does
# not matter which one is at hand.
_GPU = [
    *(flag for flag in _KERNEL if flag != "-fPIC"),
    "--target=spir64",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-mllvm",
    "-disable-vector-combine",
    "-mllvm",
    "-inline-threshold=10000000",
    "-mllvm",
    "-unroll-threshold=800",
    "-mllvm",
    "-pragma-unroll-threshold=10000000",
    "-g",
    "-fno-discard-value-names",
    "-Xclang",
    "-fexperimental-assignment-tracking=disabled",
]
# The same, but with loops as they are written, and an index no longer than it is written: what a
# GPU would issue can be counted in it.
_COUNTED = [
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-mllvm",
    "-inline-threshold=10000000",
    "-mllvm",
    "-pragma-unroll-threshold=10000000",
    "-mllvm",
    "-unroll-runtime=false",
    "-mllvm",
    "-unroll-allow-partial=false",
    "-mllvm",
    "-indvars-widen-indvars=false",
    "-gline-tables-only",
]
# Vectorised loops would make accesses of sizes that the instrumentation passes over.
_CHECKED = [
    "-DMSL_CHECKED",
    "-fsanitize=thread",
    # Past the driver, which may know only some sanitizers.
    "-Xclang",
    "-fsanitize=array-bounds,integer-divide-by-zero",
    "-mllvm",
    "-tsan-instrument-func-entry-exit=0",
    "-mllvm",
    "-tsan-instrument-atomics=0",
    "-mllvm",
    "-tsan-instrument-read-before-write=1",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    # A load of a vector stays one access, though only single elements are used.
    "-mllvm",
    "-disable-vector-combine",
    # Loops are as long as they are written: unrolled ones take long to compile, and show no more.
    "-mllvm",
    "-pragma-unroll-threshold=0",
    # An access stays in its loop, and on its line.
    "-mllvm",
    "-disable-licm-promotion",
    "-ftrivial-auto-var-init=pattern",
]
# Where a thread goes is told, and branches stay branches.
_TRACED = [
    *_INLINED,
    "-Xclang",
    "-fsanitize-coverage-type=3",
    "-Xclang",
    "-fsanitize-coverage-trace-pc",
    "-Xclang",
    "-fsanitize-coverage-no-prune",
    "-mllvm",
    "-phi-node-folding-threshold=0",
    "-mllvm",
    "-two-entry-phi-node-folding-threshold=0",
]
# Only what the language demands is looked at.
_UNOPTIMISED = ["-Xclang", "-disable-llvm-passes"]
_STYLES = {
    "inlined": _INLINED,
    "counted": _COUNTED,
    "unoptimised": _UNOPTIMISED,
    "traced": _TRACED,
}
_PREPROCESSED = ["-E", "-x", "c++", "-std=c++17", "-nostdinc", "-undef", "-Wno-everything"]
# The passes have run: what is left is code generation.
_OBJECT = ["-O2", "-fPIC", "-Wno-everything", "-Xclang", "-disable-llvm-passes"]


def _kernel_flags(checked: bool, style: str = "inlined") -> list[str]:
    if style == "gpu":
        return _GPU
    return [*_KERNEL, *_STYLES[style], *(_CHECKED if checked else [])]


class CompilerMissing(RuntimeError):
    """No usable C++ compiler on this machine."""


class CommandFailed(Exception):
    """The compiler refused; `text` is what it said."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


@dataclass(frozen=True)
class Toolchain:
    """`clang` starts the compiler for kernels, which need no C library, `driver` the one that knows
    it, `bare` one for any target; `identity` changes with the compiler's version and the CPU it
    compiles for."""

    bare: tuple[str, ...]
    clang: tuple[str, ...]
    driver: tuple[str, ...]
    identity: str
    is_zig: bool

    def recipe(self, checked: bool, style: str = "inlined") -> str:
        """Everything but the source that decides what becomes of a kernel."""
        flags = (_PREPROCESSED, _kernel_flags(checked, style), _OBJECT)
        return repr((self.identity, self.clang[1:], flags))

    def preprocess(self, text: str, name: str, flags: list[str]) -> str:
        """`text` after the preprocessor, with line markers that call it `name`."""
        return _execute([*self.clang, *_PREPROCESSED, *flags, "-"], f'# 1 "{name}"\n{text}')[0]

    def precompile(self, header: Path, target: Path, checked: bool) -> None:
        """A header that `to_intermediate` then need not read again."""
        flags = [*_kernel_flags(checked), "-I", str(header.parent)]
        # Headers are told apart by their contents, so their times mean nothing.
        flags += ["-Xclang", "-fno-pch-timestamp", "-x", "c++-header"]
        _execute([*self.clang, *flags, str(header), "-o", str(target)])

    def to_intermediate(
        self, source: Path, target: Path, header: Path, checked: bool, style: str = "inlined"
    ) -> str:
        """C++ to textual LLVM IR, after a precompiled `header`; returns the warnings. The style
        "counted" puts each kernel into one function with loops as they are written, "traced" tells
        where a thread goes, "unoptimised" leaves all as it is, "gpu" is what a GPU's compiler has,
        after a header that is text."""
        if style == "gpu":
            start = [*self.bare, *_GPU, "-include", str(header)]
        else:
            start = [*self.clang, *_kernel_flags(checked, style), "-include-pch", str(header)]
        return _execute([*start, "-S", "-emit-llvm", str(source), "-o", str(target)])[1]

    def to_object(self, source: Path, target: Path) -> None:
        """LLVM IR to an object file."""
        _execute([*self.clang, *_OBJECT, "-c", str(source), "-o", str(target)])

    def compile_machine(self, source: Path, target: Path, checked: bool) -> None:
        """The machine's own C++ to an object file."""
        flags = [*_COMMON, "-DMSL_MACHINE", "-Wall", "-Wextra"]
        flags += ["-DMSL_CHECKED"] if checked else []
        _execute([*self.driver, *flags, "-c", str(source), "-o", str(target)])

    def link(self, objects: list[Path], target: Path) -> None:
        """A shared library. Its open symbols are those of libc and libm, present in any process,
        and those of the machine, which is loaded before it."""
        names = [str(o) for o in objects]
        if self.is_zig and sys.platform == "linux":
            # The bare linker: the driver would first build a C library.
            zig = self.driver[0]
            _execute([zig, "ld.lld", "-shared", "--gc-sections", *names, "-o", str(target)])
        else:
            # Mach-O wants to be told that open symbols are meant
            open_symbols = ["-Wl,-undefined,dynamic_lookup"] if sys.platform == "darwin" else []
            _execute([*self.driver, "-shared", *open_symbols, *names, "-o", str(target)])


def _execute(command: list[str], stdin: str | None = None) -> tuple[str, str]:
    """Runs `command` and returns what it wrote to stdout and stderr. It has a limit of time and
    memory, and ends with all that it started when this process is interrupted."""
    environment = dict(os.environ)
    # zig keeps caches of its own; they belong beside ours.
    for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        environment[name] = str(cache_directory() / "zig")
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        stdin=pipe if stdin is not None else subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            _limit_memory(process.pid)
            output, errors = process.communicate(stdin, MAX_SECONDS)
        except subprocess.TimeoutExpired:
            _end(process.pid)
            message = f"compiling took longer than {MAX_SECONDS} seconds and was stopped"
            raise CommandFailed(message) from None
        except BaseException:
            _end(process.pid)
            raise
    if process.returncode:
        for number in FULL:
            if os.strerror(number) in errors:
                raise OSError(number, os.strerror(number))
        raise CommandFailed(errors or f"{command[0]} ended with {process.returncode}")
    return output, errors


def _end(group: int) -> None:
    # it may have ended by itself
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _limit_memory(process: int) -> None:
    if sys.platform == "linux":
        resource.prlimit(process, resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))


@lru_cache(maxsize=1)
def toolchain() -> Toolchain:
    """The compiler to use, found once per process: $MSLSIM_CXX (a clang++, or `zig` for the one of
    the ziglang package), else zig, whose version pip knows and registers were fitted to, else a
    clang++ on PATH."""
    chosen = os.environ.get("MSLSIM_CXX")
    if chosen:
        found = _zig() if chosen == "zig" else _clang([chosen])
        missing = f"MSLSIM_CXX={chosen} is no clang++ >= {OLDEST_CLANG}"
    else:
        found = _zig() or _clang(["clang++", *(f"clang++-{v}" for v in range(30, 18, -1))])
        missing = f"needs clang >= {OLDEST_CLANG} on PATH, or: pip install ziglang"
    if not found:
        raise CompilerMissing(f"mslsim: {missing}")
    return found


def _zig() -> Toolchain | None:
    spec = importlib.util.find_spec("ziglang")
    if not (spec and spec.submodule_search_locations):
        return None
    zig = str(Path(next(iter(spec.submodule_search_locations))) / "zig")
    driver: tuple[str, ...] = (zig, "c++")
    clang = driver
    if sys.platform == "linux":
        # The clang inside zig starts in half the time, and keeps no cache of its own.
        clang = (zig, "clang", f"--target={platform.machine()}-linux-gnu", _native())
    identity = _version(zig, "version") + _cpu_features()
    return Toolchain((zig, "clang"), clang, driver, identity, True)


def _clang(names: list[str]) -> Toolchain | None:
    for name in names:
        path = shutil.which(name)
        version = _version(path, "--version") if path else ""
        if path and _upstream_major(version) >= OLDEST_CLANG:
            command = (path, _native())
            return Toolchain((path,), command, command, version + _cpu_features(), False)
    return None


def _native() -> str:
    return "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"


@lru_cache(maxsize=32)
def _version(path: str, argument: str) -> str:
    """What the compiler says of itself, but for where it is."""
    text = subprocess.run([path, argument], capture_output=True, text=True).stdout
    return "".join(line for line in text.splitlines(True) if not line.startswith("InstalledDir"))


def _upstream_major(version: str) -> int:
    """Major version of an upstream clang; 0 for Apple's, whose numbers mean something else."""
    match = re.search(r"clang version (\d+)", version)
    return int(match[1]) if match and "Apple" not in version else 0


def _cpu_features() -> str:
    """A home folder may be shared by unlike machines; code is built for the one at hand."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        match = re.search(r"^(?:flags|Features)\s*:(.*)$", info.read_text(), re.MULTILINE)
        if match:
            return digest(match[1])
    return platform.processor() or platform.machine()


def included(path: Path) -> list[Path]:
    """`path` and the files of this package that it includes, each once."""
    files: list[Path] = []
    pending = [path]
    while pending:
        file = pending.pop()
        if file not in files and file.is_file():
            files.append(file)
            names = re.findall(r'^\s*#include "([^"]+)"', file.read_text(), re.MULTILINE)
            pending += [(file.parent / name).resolve() for name in names]
    return sorted(files)
