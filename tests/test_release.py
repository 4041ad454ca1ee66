# SPDX-License-Identifier: MIT
"""What is published: its version, and the files that make it."""

import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
VERSION = runpy.run_path(str(ROOT / "release/version.py"))


@pytest.mark.parametrize(
    ("described", "version"),
    [
        ("v0.2.0", "0.2.0"),
        ("v0.2.0-0-g1a2b3c4", "0.2.0"),
        ("v0.2.0-7-g1a2b3c4", "0.2.1.dev7"),
        ("v0.2.0rc1", "0.2.0rc1"),
        ("v0.2.0rc1-3-gffff", "0.2.0rc2.dev3"),
        ("v1.10-2-gab", "1.11.dev2"),
        ("", None),
        ("main", None),
        ("$Format:%(describe:tags=true)$", None),
    ],
)
def test_a_version_is_that_of_the_tag(described: str, version: str | None) -> None:
    assert VERSION["of_description"](described) == version


def test_versions_of_repositories_archives_and_copies(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=x", "-c", "user.email=x@x")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    of_repository = VERSION["of_repository"]
    assert of_repository(tmp_path) == f"{VERSION['NEXT']}.dev0"
    (tmp_path / ".git_archival.txt").write_text("node: 1\ndescribe-name: v0.3.0-2-gabc\n")
    assert of_repository(tmp_path) == "0.3.1.dev2"
    git("init")
    git("commit", "--allow-empty", "--message", "one")
    assert of_repository(tmp_path) == f"{VERSION['NEXT']}.dev1"
    git("tag", "v0.4.0")
    assert of_repository(tmp_path) == "0.4.0"
    # a copy in the repository of something else
    (tmp_path / "vendored").mkdir()
    assert of_repository(tmp_path / "vendored") == f"{VERSION['NEXT']}.dev0"


def test_a_source_distribution_keeps_its_version(tmp_path: Path) -> None:
    assert VERSION["of_source_distribution"](tmp_path) is None
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: x\nVersion: 0.2.0\n")
    assert VERSION["of_source_distribution"](tmp_path) == "0.2.0"
