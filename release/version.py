# SPDX-License-Identifier: MIT
"""The version of both distributions: that of the newest git tag, `v0.2.0`.

Commits after a tag count as versions before the next: `0.2.1.dev7`. A source distribution knows its
version, and an archive that git made knows the tag. Other copies are of a version before the next.
"""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Where no tag tells: the version that is being made.
NEXT = "0.2.0"

_ROOT = Path(__file__).resolve().parent.parent
_DESCRIBED = re.compile(r"v(?P<version>[\d.]+(?:rc\d+)?)(?:-(?P<commits>\d+)-g[0-9a-f]+)?")


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, str]:
    """What scikit-build-core asks for, in the folder of pyproject.toml."""
    return {"version": of_source_distribution(Path.cwd()) or of_repository(_ROOT)}


def of_source_distribution(folder: Path) -> str | None:
    """What its PKG-INFO says; None where there is none."""
    file = folder / "PKG-INFO"
    found = re.search(r"^Version: (.+)$", file.read_text(), re.MULTILINE) if file.exists() else None
    return found[1] if found else None


def of_repository(root: Path) -> str:
    """By git, by what git wrote into an archive, or for lack of both the next one."""
    # a copy inside of the repository of something else is not ours
    if _git(root, "rev-parse", "--show-toplevel") == str(root):
        described = _git(root, "describe", "--tags", "--match", "v[0-9]*")
        commits = _git(root, "rev-list", "--count", "HEAD") or "0"
        return of_description(described) or f"{NEXT}.dev{commits}"
    archival = root / ".git_archival.txt"
    text = archival.read_text() if archival.exists() else ""
    described = re.search(r"^describe-name: (\S+)$", text, re.MULTILINE)
    return of_description(described[1] if described else "") or f"{NEXT}.dev0"


def of_description(described: str) -> str | None:
    """The version of what `git describe` says: `v0.2.0`, or `v0.2.0-7-g1a2b3c4`."""
    found = _DESCRIBED.fullmatch(described)
    if found is None:
        return None
    version, commits = found["version"], found["commits"]
    if not commits or commits == "0":
        return version
    head, last = re.fullmatch(r"(.*?)(\d+)", version).groups()
    return f"{head}{int(last) + 1}.dev{commits}"


def _git(root: Path, *arguments: str) -> str:
    """What git prints; nothing where it fails or is not there."""
    try:
        shown = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return shown.stdout.strip() if shown.returncode == 0 else ""
