# SPDX-License-Identifier: MIT
"""The notes of a release: its section of CHANGELOG.md. `python release/notes.py v0.2.0`"""

import re
import sys
from pathlib import Path


def notes(changelog: str, version: str) -> str:
    """The section of `version`, without its title.

    Raises:
        ValueError: there is none.
    """
    title = rf"^## {re.escape(version.removeprefix('v'))}(?!\S)[^\n]*\n"
    found = re.search(rf"{title}(?P<text>.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"CHANGELOG.md has no section {version}")
    return found["text"].strip() + "\n"


if __name__ == "__main__":
    file = Path(__file__).resolve().parent.parent / "CHANGELOG.md"
    print(notes(file.read_text(), sys.argv[1]), end="")
