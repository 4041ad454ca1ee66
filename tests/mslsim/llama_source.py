# SPDX-License-Identifier: MIT
"""The Metal sources of llama.cpp, from releases of llama-cpp-python: fetched for a test, and not
part of the repository."""

import subprocess
import sys
import tarfile
import tempfile
from functools import partial
from pathlib import Path

import pytest

from mslsim.cache import entry

KERNELS = "ggml/src/ggml-metal"
FILES = (f"{KERNELS}/ggml-metal.metal", f"{KERNELS}/ggml-metal-impl.h", "ggml/src/ggml-common.h")


def _fetch(release: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", release, "--no-deps", "-d", folder]
        command += ["--no-binary", ":all:", "--no-build-isolation", "--quiet", "--retries", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        archives = list(Path(folder).glob("*.tar.gz"))
        if not archives:
            pytest.skip(f"pip cannot download {release}: {done.stderr.strip()[-300:]}")
        with tarfile.open(archives[0]) as archive:
            for member in archive:
                found = next(
                    (f for f in FILES if member.name.endswith(f"vendor/llama.cpp/{f}")), ""
                )
                if found:
                    content = archive.extractfile(member)
                    assert content is not None
                    (target / Path(found).name).write_bytes(content.read())


def folder(release: str) -> Path:
    """Where the sources of a release are."""
    return entry(f"sources-{release}", partial(_fetch, release))


def text(release: str) -> str:
    """The kernels; the sources include each other by where they are in their repository."""
    kernels = (folder(release) / "ggml-metal.metal").read_text()
    return kernels.replace('"../ggml-common.h"', '"ggml-common.h"')
