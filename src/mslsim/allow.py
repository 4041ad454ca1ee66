# SPDX-License-Identifier: MIT
"""Comments that let findings pass: `// mslsim: allow(division64): once for each row`.

One counts for its line, and where it stands alone for the next line with code.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from .report import Finding

_COMMENT = re.compile(r"//\s*mslsim:\s*allow\(([^)]*)\)\s*(?::\s*(.*))?$")
_MARKER = re.compile(r'\s*#\s*(?:line\s*)?(\d+)\s+"([^"]+)"')


class Allowed:
    """The comments of a source called `name`, and of the `files` that it includes; `kinds` are the
    findings that can be let pass."""

    def __init__(self, text: str, name: str, files: Iterable[str], kinds: Collection[str]) -> None:
        self._kinds = kinds
        self._allowed: set[tuple[str, str, int]] = set()
        self.findings: list[Finding] = []
        self._read(text, name)
        for file in files:
            self._read(Path(file).read_text(), file)

    def __call__(self, finding: Finding) -> bool:
        return (finding.kind, finding.file, finding.line) in self._allowed

    def _read(self, text: str, name: str) -> None:
        waiting: list[str] = []
        for file, line, content in _lines(text, name):
            comment = _COMMENT.search(content)
            code = content.partition("//")[0].strip()
            if comment:
                waiting += self._kinds_of(comment, file, line)
            if code:
                self._allowed.update((kind, file, line) for kind in waiting)
                waiting = []

    def _kinds_of(self, comment: re.Match[str], file: str, line: int) -> list[str]:
        kinds = [kind.strip() for kind in comment[1].split(",")]
        unknown = [kind for kind in kinds if kind not in self._kinds]
        if unknown:
            known = ", ".join(sorted(self._kinds))
            message = f"{unknown[0]} is nothing that a comment lets pass; there are {known}"
            self.findings.append(Finding("allow", message, "", file, line))
        if not (comment[2] or "").strip():
            message = f"say why: // mslsim: allow({comment[1]}): <reason>"
            self.findings.append(Finding("allow", message, "", file, line))
            return []
        return kinds


def _lines(text: str, name: str) -> Iterator[tuple[str, int, str]]:
    """Lines with their places, by the line markers in the text."""
    file, line = name, 0
    for content in text.splitlines():
        line += 1
        if marker := _MARKER.match(content):
            file, line = marker[2], int(marker[1]) - 1
        else:
            yield file, line, content
