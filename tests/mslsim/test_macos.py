# SPDX-License-Identifier: MIT
"""Libraries for macOS, cross-linked by zig: kernels leave open what the machine defines."""

from pathlib import Path

import pytest
import ziglang

from mslsim import compiler
from mslsim.compiler import Toolchain

ZIG = str(Path(ziglang.__file__).parent / "zig")
FOR_MACOS = (ZIG, "cc", "-target", "aarch64-macos.14.0")


def test_a_library_with_open_symbols_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSLSIM_CACHE", str(compiler.cache_directory()))
    source, made, library = (tmp_path / name for name in ("k.c", "k.o", "k.so"))
    source.write_text("void barrier(int); void kernel(void) { barrier(1); }\n")
    compiler._execute([*FOR_MACOS, "-c", str(source), "-o", str(made)])
    monkeypatch.setattr("sys.platform", "darwin")
    Toolchain(FOR_MACOS, FOR_MACOS, FOR_MACOS, "", is_zig=True).link([made], library)
    assert library.read_bytes()[:4] == b"\xcf\xfa\xed\xfe"
