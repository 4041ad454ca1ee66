# SPDX-License-Identifier: MIT
"""What is published: its version, and the files that make it."""

import re
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


def test_notes_are_the_section_of_the_version() -> None:
    notes = runpy.run_path(str(ROOT / "release/notes.py"))["notes"]
    text = "# Changelog\n\n## 0.3.0 (unreleased)\n\n- c\n\n## 0.2.0 (2026-12-01)\n\n- a\n- b\n"
    assert notes(text, "v0.2.0") == "- a\n- b\n"
    assert notes(text, "v0.3.0") == "- c\n"
    with pytest.raises(ValueError, match=r"CHANGELOG.md has no section v0.2$"):
        notes(text, "v0.2")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "`rms_norm`" in notes(changelog, f"v{VERSION['NEXT']}")


def test_actions_are_pinned_and_permissions_are_least() -> None:
    files = sorted((ROOT / ".github/workflows").glob("*.yml"))
    assert {f.stem for f in files} == {"ci", "docs", "nightly", "release", "wheels"}
    for file in files:
        text = file.read_text()
        assert re.search(r"^permissions: \{\}$", text, re.MULTILINE), file.name
        for action in re.findall(r"^[ -]*uses: (\S+)", text, re.MULTILINE):
            assert action.startswith("./") or re.search(r"@[0-9a-f]{40}$", action), action
        assert "secrets." not in text


def test_what_is_no_mac_library_is_refused() -> None:
    read = runpy.run_path(str(ROOT / "release/macho.py"))["read"]
    with pytest.raises(ValueError, match="must be a Mach-O library for arm64"):
        read(b"\x7fELF" + bytes(64))


def test_both_packages_say_the_same_of_themselves() -> None:
    texts = [(ROOT / p).read_text() for p in ("pyproject.toml", "release/mslsim/pyproject.toml")]
    for key in ("requires-python", "license", "authors", "minimum-version"):
        lines = {re.search(rf"^{key} = .*$", text, re.MULTILINE)[0] for text in texts}  # type: ignore[index]
        assert len(lines) == 1, lines
