# SPDX-License-Identifier: MIT
"""The C++ compiler behind the simulator: clang 19 or later, or the one in the ziglang package."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

OLDEST_CLANG = 19
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
# As a GPU's compiler has it: one function for each kernel, and no vectors of its own making. With
# the names of variables.
_WHOLE = [
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-mllvm",
    "-inline-threshold=10000000",
    "-mllvm",
    "-pragma-unroll-threshold=10000000",
    "-g",
    "-fno-discard-value-names",
    "-Xclang",
    "-fexperimental-assignment-tracking=disabled",
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


class CompilerMissing(RuntimeError):
    """No usable C++ compiler on this machine."""


class CommandFailed(Exception):
    """The compiler refused; `text` is what it said."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def cache_directory() -> Path:
    """Where built libraries are kept: $MSLSIM_CACHE or the user's cache folder."""
    chosen = os.environ.get("MSLSIM_CACHE")
    if chosen:
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mslsim"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mslsim"


@dataclass(frozen=True)
class Toolchain:
    """`command` starts the C++ compiler; `identity` changes when it does."""

    command: tuple[str, ...]
    identity: str
    is_zig: bool

    def run(self, arguments: list[str], stdin: str | None = None) -> tuple[str, str]:
        """Runs the compiler and returns what it wrote to stdout and stderr."""
        return _execute([*self.command, *arguments], stdin)

    def preprocess(self, text: str, name: str, flags: list[str]) -> str:
        """`text` after the preprocessor, with line markers that call it `name`."""
        arguments = ["-E", "-x", "c++", "-std=c++17", "-nostdinc", "-undef", "-Wno-everything"]
        return self.run([*arguments, *flags, "-"], f'# 1 "{name}"\n{text}')[0]

    def to_intermediate(
        self, source: Path, target: Path, checked: bool, whole: bool = False
    ) -> str:
        """C++ to textual LLVM IR, optimised; returns the warnings. `whole` puts each kernel into
        one function."""
        flags = [*_KERNEL, *(_WHOLE if whole else _INLINED), *(_CHECKED if checked else [])]
        flags += self._cpu()
        include = ["-I", str(source.parent), "-I", str(PACKAGE / "machine")]
        return self.run([*flags, *include, "-S", "-emit-llvm", str(source), "-o", str(target)])[1]

    def to_object(self, source: Path, target: Path, flags: list[str] | None = None) -> None:
        """One translation unit (C++ or IR) to an object file."""
        if source.suffix == ".ll":
            chosen = ["-O2", "-fPIC", "-Wno-everything", "-Xclang", "-disable-llvm-passes"]
        else:
            chosen = [*_COMMON, "-DMSL_MACHINE", "-Wall", "-Wextra"]
        self.run([*chosen, *self._cpu(), *(flags or []), "-c", str(source), "-o", str(target)])

    def link(self, objects: list[Path], target: Path) -> None:
        """A shared library. Its open symbols are those of libc and libm, present in any process."""
        names = [str(o) for o in objects]
        if self.is_zig and sys.platform == "linux":
            # The bare linker: the driver would first build a C library.
            zig = self.command[0]
            _execute([zig, "ld.lld", "-shared", "--gc-sections", *names, "-o", str(target)], None)
        else:
            self.run(["-shared", *names, "-o", str(target)])

    def _cpu(self) -> list[str]:
        if self.is_zig:
            return []
        native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
        return [native]


def _execute(command: list[str], stdin: str | None) -> tuple[str, str]:
    environment = dict(os.environ)
    # zig keeps caches of its own; they belong beside ours.
    for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        environment[name] = str(cache_directory() / "zig")
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise CommandFailed(done.stderr or f"{command[0]} ended with {done.returncode}")
    return done.stdout, done.stderr


@lru_cache(maxsize=1)
def toolchain() -> Toolchain:
    """The compiler to use, found once per process: $MSLSIM_CXX (a clang++, or `zig` for the one of
    the ziglang package), else a clang++ on PATH, else zig."""
    chosen = os.environ.get("MSLSIM_CXX")
    names = [chosen] if chosen else ["clang++", *(f"clang++-{v}" for v in range(30, 18, -1))]
    for name in names if chosen != "zig" else []:
        path = shutil.which(name)
        if path and _clang_version(path) >= OLDEST_CLANG:
            return Toolchain((path,), _identity(path), False)
    if chosen not in (None, "zig"):
        raise CompilerMissing(f"mslsim: MSLSIM_CXX={chosen} is no clang++ >= {OLDEST_CLANG}")
    spec = importlib.util.find_spec("ziglang")
    if spec and spec.submodule_search_locations:
        zig = Path(next(iter(spec.submodule_search_locations))) / "zig"
        return Toolchain((str(zig), "c++"), _identity(str(zig)), True)
    raise CompilerMissing(f"mslsim: needs clang >= {OLDEST_CLANG} on PATH, or: pip install ziglang")


@lru_cache(maxsize=32)
def _clang_version(path: str) -> int:
    """Major version of an upstream clang; 0 for Apple's, whose numbers mean something else."""
    text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"clang version (\d+)", text)
    return int(match[1]) if match and "Apple" not in text else 0


def _identity(path: str) -> str:
    state = os.stat(path)
    return f"{path}:{state.st_size}:{state.st_mtime_ns}:{_cpu_features()}"


def _cpu_features() -> str:
    """A home folder may be shared by unlike machines; code is built for the one at hand."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        match = re.search(r"^(?:flags|Features)\s*:(.*)$", info.read_text(), re.MULTILINE)
        if match:
            return hashlib.sha256(match[1].encode()).hexdigest()[:12]
    return platform.processor() or platform.machine()


@lru_cache(maxsize=1)
def package_digest() -> str:
    """Changes when any source of this package does."""
    digest = hashlib.sha256()
    for path in sorted(p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".h", ".cpp")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    return digest.hexdigest()
