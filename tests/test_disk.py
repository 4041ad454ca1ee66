# SPDX-License-Identifier: MIT
"""Homes that cannot be read or written, and full disks: all works without, and nothing is lost."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from metalcore import _policy, tune
from metalcore.cli import app

NOBODY = 65534


@contextmanager
def full_disk(free: int) -> Iterator[None]:
    """No file can be longer than so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_nobody_knows_a_home_folder() -> None:
    program = (
        "import pwd\n"
        "def unknown(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = unknown\n"
        "import metalcore\n"
        "from metalcore import _policy, tune\n"
        "try: tune.write(_policy.user_file(), 'silu', '')\n"
        "except ValueError as error: print(error)\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "HOME"}
    run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    expected = "tune: this user has no home folder; METALCORE_POLICY names a file\n"
    assert (run.stdout, run.stderr) == (expected, "")
    assert not Path("~").exists()


def test_a_home_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    monkeypatch.setenv("METALCORE_POLICY", str(closed / "policy.toml"))
    is_root = os.geteuid() == 0  # for whom nothing is closed
    try:
        if is_root:
            os.seteuid(NOBODY)
        assert _policy._read(_policy.user_file()) == {}
        with pytest.raises(OSError, match=r"policy\.toml: Permission denied; METALCORE_POL"):
            tune.write(_policy.user_file(), "silu", "")
    finally:
        if is_root:
            os.seteuid(0)


def test_a_full_disk_leaves_the_policy_as_it_was(write_policy: Callable[[str], Path]) -> None:
    file = write_policy("[silu]\nx = 1\n")
    with full_disk(16), pytest.raises(OSError, match=f"tune: cannot write {file}: File too large"):
        tune.write(file, "gelu", "y = 2\n" * 100)
    assert file.read_text() == "[silu]\nx = 1\n"
    assert list(file.parent.iterdir()) == [file]


def test_a_policy_is_kept_where_a_link_points_to(write_policy: Callable[[str], Path]) -> None:
    file = write_policy("")
    link = file.with_name("link.toml")
    link.symlink_to(file)
    tune.write(link, "silu", "x = 1")
    assert link.is_symlink()
    assert file.read_text() == "[silu]\nx = 1\n"
    with pytest.raises(ValueError, match="is no file"):
        tune.write(Path(os.devnull), "silu", "x = 1")


def test_tune_tells_in_a_line_what_it_cannot_write(
    write_policy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    below = write_policy("") / "metalcore" / "policy.toml"
    monkeypatch.setenv("METALCORE_POLICY", str(below))
    monkeypatch.setattr(tune, "override_cost", lambda: 0.0)
    result = CliRunner().invoke(app, ["tune", "silu"], env={"COLUMNS": "500"})
    assert result.exit_code == 1
    last = result.output.splitlines()[-1]
    assert last.startswith(f"error: tune: cannot write {below}: Not a directory; METALCORE_POLICY")


def test_a_policy_that_is_no_toml_is_named(write_policy: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match=r"policy\.toml: Expected '='"):
        write_policy("silu\n")
