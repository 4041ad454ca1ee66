# SPDX-License-Identifier: MIT
"""The worker process as its parent sees it, and the file they share."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .arguments import Row
from .build import machine_library
from .cache import cache_directory
from .compiler import PACKAGE
from .frontend.rewrite import symbol
from .worker import SESSION_BYTES, Session

# What the worker gets of the environment: no more than starting takes.
_ENVIRONMENT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PATH", "MSLSIM_ISOLATION")
# How often the watchdog looks, in seconds.
_LOOK = 0.25
# A threadgroup that keeps passing barriers hangs after so many times the limit without progress.
_GROUP_LIMITS = 10
# Where a file is memory; containers may have little of it.
_SHARED_MEMORY = ("/dev/shm",)


def _make_room(file: int, size: int) -> None:
    """Has the system keep `size` bytes for a file: to write past what it has ends a process."""
    if sys.platform == "darwin":
        os.truncate(file, size)
    else:
        os.posix_fallocate(file, 0, size)


class Died(Exception):
    """The worker ended or hung; `hung` tells which."""

    def __init__(self, hung: bool, said: str = "") -> None:
        super().__init__(("hung" if hung else "died") + (f": {said}" if said else ""))
        self.hung = hung


class Worker:
    """The other process, and the file shared with it. Starts again after a death."""

    def __init__(self) -> None:
        self._folders = [f for f in _SHARED_MEMORY if os.path.isdir(f)] + [tempfile.gettempdir()]
        self._open_shared()
        self._map: mmap.mmap | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = 0
        self._owes_answer = False
        self._folder: Path | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._owner = os.getpid()
        self.session = Session()
        self.reserve(SESSION_BYTES)

    def _open_shared(self) -> None:
        handle, self._path = tempfile.mkstemp(prefix="mslsim-", dir=self._folders[0])
        self._file = os.fdopen(handle, "r+b", buffering=0)

    def _close_shared(self) -> None:
        self._file.close()
        Path(self._path).unlink(missing_ok=True)

    def reserve(self, size: int) -> None:
        """Makes the shared file at least `size` bytes long, and this process the only one that
        writes to it."""
        if self._owes_answer:
            self.stop()
        if self._map is not None and len(self._map) >= size:
            return
        while True:
            try:
                _make_room(self._file.fileno(), size)
                break
            except OSError as error:
                if len(self._folders) == 1:
                    raise OSError(
                        f"the buffers of a kernel need {-(-size >> 20)} MiB in {self._folders[0]}: "
                        f"{error.strerror}"
                    ) from None
                self.stop()
                self._close_shared()
                del self._folders[0]
                self._open_shared()
        self._map = mmap.mmap(self._file.fileno(), size)
        self.session = Session.from_buffer(self._map)

    def address(self) -> int:
        assert self._map is not None
        return ctypes.addressof(self.session)

    def _start(self) -> subprocess.Popen[bytes]:
        # it can read no other folder
        folder = cache_directory()
        if folder != self._folder or self._owes_answer:
            self.stop()
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-E", "-s", str(PACKAGE / "worker.py")]
            command += [str(machine_library(checked=True)), self._path, str(folder)]
            self._folder = folder
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={name: value for name, value in os.environ.items() if name in _ENVIRONMENT},
            )
        return self._process

    def ask(self, request: dict[str, Any], timeout: float) -> Any:
        """The worker's answer to `request`; see `send` and `wait`."""
        self.send(request)
        return self.wait(timeout)

    def send(self, request: dict[str, Any]) -> None:
        """Sets the worker to work. Raises Died when it cannot take the request."""
        process = self._start()
        assert process.stdin
        self._requests += 1
        self._owes_answer = True
        with self._ended_by_exceptions():
            try:
                numbered = request | {"number": self._requests}
                process.stdin.write(json.dumps(numbered).encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise Died(False, self._said()) from None

    def wait(self, timeout: float) -> Any:
        """The answer to the last request. Raises Died when there is none: after `timeout` without
        progress, or ten times that in one threadgroup."""
        process = self._process
        assert process
        assert process.stdout
        with self._ended_by_exceptions():
            now = time.monotonic()
            steps, since, group, entered = -1, now, -1, now
            while not select.select([process.stdout], [], [], _LOOK)[0]:
                now, session = time.monotonic(), self.session
                if session.steps != steps:
                    steps, since = session.steps, now
                if session.group != group:
                    group, entered = session.group, now
                if now - since > timeout or now - entered > _GROUP_LIMITS * timeout:
                    raise Died(True)
            line = process.stdout.readline()
            if not line:
                raise Died(False, self._said())
            number, answer = json.loads(line)
            if number != self._requests:
                raise Died(False, f"it answered request {number}, not {self._requests}")
            self._owes_answer = False
            return answer

    @contextmanager
    def _ended_by_exceptions(self) -> Iterator[None]:
        """Whatever stops the parent (Ctrl-C too) ends the worker, which would work on for nobody.
        Where it comes too early or too late for that, `_owes_answer` tells who asks next."""
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-2000:]

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                # of a request that was not sent, the rest is in the way
                with suppress(BrokenPipeError):
                    if pipe:
                        pipe.close()
            self._process = None
        self._owes_answer = False

    def close(self) -> None:
        """Ends the worker; a fork that inherited it leaves it to its owner."""
        if os.getpid() == self._owner:
            self.stop()
            self._close_shared()
        self._file.close()
        self._errors.close()

    def isolation(self) -> list[str]:
        """What the worker has given up: "files", "network", "processes"."""
        answer: list[str] = self.ask({"action": "isolation"}, 60.0)
        return answer

    def table(self, library: Path, kernel: str, names: list[tuple[str, str]]) -> list[Row]:
        """The kernel's own description of its buffers, as the compiler saw them."""
        request = {
            "action": "table",
            "library": str(library),
            "symbol": f"msl_table_{symbol(kernel)}",
            "rows": len(names),
        }
        rows = self.ask(request, 60.0)
        return [Row.read(p, r) for p, r in zip(names, rows, strict=True)]
