# SPDX-License-Identifier: MIT
"""Folders that cannot be written and disks that are full: told in a line, and nothing is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNEL = "kernel void k(device int* y, uint i [[thread_position_in_grid]]) { y[i] = 1; }\n"
LAUNCH = 'kernel = "k"\nthreads = 4\ngroup_size = 4\n[[arguments]]\nshape = [{}]\ndtype = "int32"\n'
# Mounts a small disk that no other process sees.
MOUNT = ["unshare", "--map-root-user", "--mount", "sh", "-ec"]
MOUNTED = 'mount -t tmpfs -o size=$1 none "$2"; shift 2; exec "$@"'


def _may_mount() -> bool:
    try:
        command = [*MOUNT, MOUNTED, "sh", "64k", "/mnt", "true"]
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


small_disks = pytest.mark.skipif(not _may_mount(), reason="no small disk can be mounted here")


def check(tmp_path: Path, *start: str, values: int = 4, **env: str) -> tuple[int, str]:
    """Exit code and output of `mslsim check`, started by another command."""
    kernel, launch = tmp_path / "k.metal", tmp_path / "k.toml"
    kernel.write_text(KERNEL)
    launch.write_text(LAUNCH.format(values))
    command = [*start, sys.executable, "-m", "mslsim", "check", str(kernel), "--spec", str(launch)]
    run = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    return run.returncode, run.stdout + run.stderr


def disk(size: str, folder: Path | str) -> list[str]:
    return [*MOUNT, MOUNTED, "sh", size, str(folder)]


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    home = str(tmp_path / "home")
    env = {"HOME": home, "XDG_CACHE_HOME": "", "MSLSIM_CACHE": ""}
    code, said = check(tmp_path, **env)
    folder = Path(home, "Library/Caches" if sys.platform == "darwin" else ".cache", "mslsim")
    assert (code, said) == (
        2,
        f"mslsim: cannot keep compiled kernels in {folder}: Not a directory; "
        "set MSLSIM_CACHE to a folder that can be written and has room\n",
    )


@small_disks
@pytest.mark.parametrize("size", ["16k", "2m"])
def test_a_full_disk(tmp_path: Path, size: str) -> None:
    """Met by this process, and by the compiler."""
    folder = tmp_path / "small"
    folder.mkdir()
    code, said = check(tmp_path, *disk(size, folder), MSLSIM_CACHE=str(folder / "cache"))
    assert (code, said) == (
        2,
        f"mslsim: cannot keep compiled kernels in {folder / 'cache'}: No space left on device; "
        "set MSLSIM_CACHE to a folder that can be written and has room\n",
    )


@small_disks
def test_buffers_beyond_shared_memory(tmp_path: Path) -> None:
    """Writing to a file that has no room ends a process: there must be room, or another file."""
    values = 1 << 20
    if os.path.isdir("/dev/shm"):
        assert check(tmp_path, *disk("1m", "/dev/shm"), values=values) == (0, "k: no findings\n")
    shared, temporary = disk("64k", "/dev/shm"), disk("1m", tmp_path)
    kernel = tmp_path.parent / f"{tmp_path.name}-kernel"
    kernel.mkdir()
    code, said = check(kernel, *shared, *temporary, values=values, TMPDIR=str(tmp_path))
    assert code == 2
    assert said.endswith(f"MiB in {tmp_path}: No space left on device\n")
    assert said.startswith("mslsim: the buffers of a kernel need ")
