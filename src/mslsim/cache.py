# SPDX-License-Identifier: MIT
"""Folders of results on disk, made once for all processes and kept up to a size limit.

Each entry is a folder with a manifest: the names and digests of its files. An entry is made
elsewhere and moved into place, so nobody sees half of one; one that was damaged later is made anew.
The time of the manifest is when the entry was last used.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

DEFAULT_BYTES = 1 << 30
# What was used in the last minutes stays, whatever the limit: someone may be about to load it.
KEEP_SECONDS = 600.0
# A process looks at the size of the cache at most this often.
TRIM_SECONDS = 30.0
# A disk without room, a quota, a limit on files, a disk that is only read.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_LOCKS = 64
_MANIFEST = "manifest.json"

_unharmed: set[Path] = set()
_trimmed_at = float("-inf")


def cache_directory() -> Path:
    """Where results are kept: $MSLSIM_CACHE or the user's cache folder."""
    chosen = os.environ.get("MSLSIM_CACHE")
    if chosen:
        return Path(chosen).absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mslsim"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "mslsim"


def size_limit() -> int:
    """How many bytes to keep: $MSLSIM_CACHE_BYTES, or 1 GiB."""
    text = os.environ.get("MSLSIM_CACHE_BYTES", "")
    if text and not text.isdigit():
        raise ValueError(f"MSLSIM_CACHE_BYTES must be a number of bytes, got {text!r}")
    return int(text) if text else DEFAULT_BYTES


def digest(*parts: str | bytes) -> str:
    """A key out of everything that decides a result."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()[:32]


def entry(
    name: str, fill: Callable[[Path], None], is_current: Callable[[Path], bool] = Path.is_dir
) -> Path:
    """The folder `name` of the cache. `fill` makes it where it is absent, damaged or outdated.

    Other processes that want the same entry wait. `fill` must not ask for entries itself.
    """
    folder = cache_directory() / name
    if _use(folder) and is_current(folder):
        return folder
    try:
        with _locked(name):
            if not (_use(folder) and is_current(folder)):
                _make(folder, fill)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise _unwritable(error) from None
    _trim_now_and_then()
    return folder


def _use(folder: Path) -> bool:
    """Whether the entry is whole; notes that it is used. Files are read once per process."""
    manifest = folder / _MANIFEST
    try:
        if folder not in _unharmed:
            for name, expected in json.loads(manifest.read_text()).items():
                if digest((folder / name).read_bytes()) != expected:
                    return False
            _unharmed.add(folder)
        os.utime(manifest)
    except (OSError, ValueError, AttributeError):
        # Absent, or what a manifest never holds: to be made again.
        _unharmed.discard(folder)
        return False
    return True


def _make(folder: Path, fill: Callable[[Path], None]) -> None:
    work = Path(tempfile.mkdtemp(prefix="making-", dir=folder.parent))
    try:
        fill(work)
        files = [path for path in work.rglob("*") if path.is_file()]
        known = {str(path.relative_to(work)): digest(path.read_bytes()) for path in files}
        (work / _MANIFEST).write_text(json.dumps(known))
        _remove(folder)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _unharmed.add(folder)


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """One process or thread at a time for entries of this name, and a few others."""
    try:
        file = _lock_file(cache_directory(), name)
    except OSError as error:
        raise _unwritable(error) from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_file(base: Path, name: str) -> TextIO:
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    if base.stat().st_mode & 0o022:
        # what lies here is loaded as code: nobody else may put it there
        base.chmod(0o700)
    locks = base / "locks"
    locks.mkdir(exist_ok=True)
    return open(locks / str(int(digest(name), 16) % _LOCKS), "w")


def _unwritable(error: OSError) -> OSError:
    return OSError(
        f"cannot keep compiled kernels in {cache_directory()}: {error.strerror}; "
        "set MSLSIM_CACHE to a folder that can be written and has room"
    )


def _trim_now_and_then() -> None:
    global _trimmed_at
    if time.monotonic() - _trimmed_at >= TRIM_SECONDS:
        _trimmed_at = time.monotonic()
        trim()


def trim() -> None:
    """Removes what was used longest ago, until the rest is within the limit."""
    known = []
    for child in cache_directory().iterdir():
        if child.name != "locks":
            known.append((*_age_and_size(child), child))
    total = sum(size for _, size, _ in known)
    limit, recent = size_limit(), time.time() - KEEP_SECONDS
    for used, size, child in sorted(known):
        if total <= limit or used > recent:
            return
        _remove(child)
        total -= size


def _age_and_size(path: Path) -> tuple[float, int]:
    """When a child of the cache was last used, and its bytes. Others may remove it meanwhile."""
    used, size = 0.0, 0
    files = [str(path)]
    for folder, _, names in os.walk(path):
        files += [os.path.join(folder, name) for name in names]
    for file in files:
        with suppress(FileNotFoundError):
            state = os.stat(file)
            used, size = max(used, state.st_mtime), size + state.st_size
    return used, size


def _remove(path: Path) -> None:
    """Takes `path` away at once: no one finds half of it."""
    gone = Path(tempfile.mkdtemp(prefix="removing-", dir=path.parent))
    with suppress(FileNotFoundError):
        path.rename(gone / path.name)
    shutil.rmtree(gone, ignore_errors=True)
