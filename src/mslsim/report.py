# SPDX-License-Identifier: MIT
"""What a run found: findings with their source line, and counters."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .steps import Step


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect. `threads` are indices in the threadgroup; `threadgroup` counts from 0."""

    kind: str
    message: str
    kernel: str = ""
    file: str = ""
    line: int = 0
    threads: tuple[int, ...] = ()
    threadgroup: int = -1
    column: int = 0
    # It is true, but changes no result.
    is_note: bool = False

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.line else ""
        inside = f" in {self.kernel}" if self.kernel else ""
        return f"{where}{self.kind}{inside}: {self.message}"

    @property
    def diagnostic(self) -> str:
        """As compilers write it, for editors and the annotations of CI."""
        column = f":{self.column}" if self.column else ""
        where = f"{self.file}:{self.line}{column}: " if self.line else ""
        inside = f" in {self.kernel}" if self.kernel else ""
        severity = "note" if self.is_note else "error"
        return f"{where}{severity}: {self.message} [{self.kind}{inside}]"


@dataclass(slots=True)
class Report:
    """The findings of one run, its counters, and the kernel's name. `notes` are findings that
    change no result, `log` has the lines that the kernel gave to os_log, `steps` what a traced
    thread did."""

    kernel: str = ""
    findings: list[Finding] = field(default_factory=list)
    counters: dict[str, Any] = field(default_factory=dict)
    notes: list[Finding] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.findings

    def efficiency(self, needed_bytes: int) -> float:
        """Bytes the kernel must move over the device bytes it moves; 1.0 is perfect.

        Re-reads by another threadgroup are taken to come from the cache, those by the same
        threadgroup are not.
        """
        device = self.counters.get("device", {})
        moved = int(device.get("fetched", 0)) + int(device.get("written", 0))
        return needed_bytes / moved if moved else 1.0

    def to_json(self) -> str:
        return json.dumps(
            {
                "kernel": self.kernel,
                "ok": self.ok,
                "findings": [asdict(f) for f in self.findings],
                "notes": [asdict(f) for f in self.notes],
                "log": self.log,
                "counters": self.counters,
            },
            indent=2,
        )

    def __str__(self) -> str:
        if self.ok:
            return f"{self.kernel}: no findings"
        return "\n".join(map(str, self.findings))


class KernelError(RuntimeError):
    """A kernel was run and found wrong; `findings` has all of it."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings


class CompileError(KernelError):
    """The source is not valid Metal."""


class LaunchError(KernelError, ValueError):
    """The launch breaks a limit of Metal or does not fit the kernel."""
