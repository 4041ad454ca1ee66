# SPDX-License-Identifier: MIT
"""Compiles for other machines: clang and the system's libraries come from the ziglang package, the
names of torch and of macOS's C++ library from stubs made here."""

import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import ziglang

ZIG = Path(ziglang.__file__).with_name("zig")
# libc++'s headers for macOS as Apple has it: nothing that came after 14.0.
_MACOS_FLAGS = (
    "-U_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS -D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=1 "
    "-U_LIBCPP_DISABLE_VISIBILITY_ANNOTATIONS -fno-sized-deallocation"
)


@dataclass(frozen=True)
class Target:
    """A machine that a wheel is for."""

    name: str
    triple: str
    system: str
    processor: str
    platform: str
    """The end of the wheel's name."""

    @property
    def is_macos(self) -> bool:
        return self.system == "Darwin"


# glibc 2.28 and macOS 14 are the oldest that torch itself is built for.
TARGETS = (
    Target("x86_64", "x86_64-linux-gnu.2.28", "Linux", "x86_64", "manylinux_2_28_x86_64"),
    Target("aarch64", "aarch64-linux-gnu.2.28", "Linux", "aarch64", "manylinux_2_28_aarch64"),
    Target("macos", "aarch64-macos.14.0", "Darwin", "arm64", "macosx_14_0_arm64"),
)


def make(
    target: Target, folder: Path, torch: Path, torch_names: Iterable[str], cxx_names: Iterable[str]
) -> list[str]:
    """Write a compiler for `target` and its libraries into `folder`; returns arguments of CMake.

    Args:
        target: the machine.
        folder: where to.
        torch: the folder of an installed torch, for its headers.
        torch_names: what libtorch_cpu of macOS exports in every version that is served.
        cxx_names: what the C++ library of macOS exports, as far as torch uses it.
    """
    lib = folder / "torch/lib"
    lib.mkdir(parents=True, exist_ok=True)
    include = folder / "torch/include"
    if not include.exists():
        include.symlink_to(torch / "include")
    compiler = folder / "c++"
    if target.is_macos:
        _text_stub(lib / "libtorch_cpu.tbd", "@rpath/libtorch_cpu.dylib", torch_names)
        cxx = folder / "libc++.tbd"
        _text_stub(cxx, "/usr/lib/libc++.1.dylib", cxx_names)
        # Left to itself, zig links a second C++ library into ours.
        link = (
            'for a in "$@"; do shift; [ "$a" = -bundle ] && a=-shared; set -- "$@" "$a"; done\n'
            f"exec {ZIG} cc -target {target.triple} -Wl,-install_name,@rpath/metalcore.so {cxx}"
        )
        flags = _MACOS_FLAGS
    else:
        _shared_stub(target, lib / "libtorch_cpu.so")
        # the library is needed by name, though the stub has none of its symbols
        link = f"exec {ZIG} c++ -target {target.triple} -Wl,--no-as-needed"
        flags = ""
    link += " -s"  # no debug information
    compiler.write_text(
        "#!/bin/sh\n"
        # zig writes names of CPUs with another dash
        'for a in "$@"; do shift; '
        'case "$a" in -march=*) a="-march=$(echo "${a#-march=}" | tr - _)";; esac; '
        'set -- "$@" "$a"; done\n'
        f'case " $* " in *" -c "*|*" -E "*) exec {ZIG} c++ -target {target.triple} {flags} "$@";; '
        f'esac\n{link} "$@"\n'
    )
    compiler.chmod(0o755)
    file = folder / "toolchain.cmake"
    file.write_text(_toolchain(target, compiler))
    return [f"-DCMAKE_TOOLCHAIN_FILE={file}", f"-DMETALCORE_TORCH={folder / 'torch'}"]


def _toolchain(target: Target, compiler: Path) -> str:
    lines = [
        f"set(CMAKE_SYSTEM_NAME {target.system})",
        f"set(CMAKE_SYSTEM_PROCESSOR {target.processor})",
        f"set(CMAKE_CXX_COMPILER {compiler})",
        "set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)",
        "set(CMAKE_CXX_LINKER_DEPFILE_SUPPORTED FALSE)",
        "set(CMAKE_DISABLE_PRECOMPILE_HEADERS ON)",
    ]
    if target.is_macos:
        # what CMake looks for on a Mac, and does not need here
        lines += [
            'set(CMAKE_OSX_SYSROOT "" CACHE STRING "")',
            'set(CMAKE_OSX_DEPLOYMENT_TARGET "" CACHE STRING "")',
            f'set(CMAKE_INSTALL_NAME_TOOL {shutil.which("true")} CACHE FILEPATH "")',
        ]
    return "\n".join(lines) + "\n"


def _text_stub(file: Path, install_name: str, names: Iterable[str]) -> None:
    """A library for the linker of macOS: its name and what it exports."""
    symbols = ", ".join(f"'{name}'" for name in sorted(names))
    file.write_text(
        "--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\n"
        f"install-name: '{install_name}'\ncurrent-version: 1\ncompatibility-version: 1\n"
        f"exports:\n  - targets: [ arm64-macos ]\n    symbols: [ {symbols} ]\n...\n"
    )


def _shared_stub(target: Target, file: Path) -> None:
    """An empty library: what is linked with it needs it, whatever it takes from it."""
    source = file.with_suffix(".c")
    source.write_text("")
    command = [str(ZIG), "cc", "-target", target.triple, "-shared"]
    command += ["-nostdlib", f"-Wl,-soname,{file.name}", "-o", str(file), str(source)]
    subprocess.run(command, check=True)
