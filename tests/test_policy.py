# SPDX-License-Identifier: MIT
from collections.abc import Iterator
from pathlib import Path

import pytest

from metalcore import _policy
from metalcore.metal.plans import PLANS, Spec


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "policy.toml"
    monkeypatch.setenv("METALCORE_POLICY", str(file))
    _policy.policy.cache_clear()
    _policy._user.cache_clear()
    yield file
    _policy.policy.cache_clear()
    _policy._user.cache_clear()


def test_packaged_values(user: Path) -> None:
    assert _policy.policy("rms_norm", "metal")["threads"] == 256
    assert _policy.policy("rms_norm", "nothing") == {}
    assert _policy.policy("no_such_op", "metal") == {}


def test_a_user_file_overrides_single_values(user: Path) -> None:
    user.write_text("[rms_norm.metal]\nthreads = 512\n")
    values = _policy.policy("rms_norm", "metal")
    assert values["threads"] == 512
    assert values["simdgroups"] == 8
    program = PLANS["rms_norm"].program((Spec.contiguous((2, 8192)), None, 1e-6, 0.0))
    assert program is not None
    assert [launch.group for launch in program.launches] == [(512, 1, 1)]


def test_an_unknown_key_is_an_error(user: Path) -> None:
    user.write_text("[rms_norm.metal]\nthraeds = 512\n")
    with pytest.raises(ValueError, match=r"rms_norm: .* sets thraeds, which is none of threads"):
        _policy.policy("rms_norm", "metal")


def test_a_value_of_another_type_is_an_error(user: Path) -> None:
    user.write_text('[rms_norm.metal]\nthreads = "many"\n')
    with pytest.raises(ValueError, match=r"threads must be of type int, got 'many'"):
        _policy.policy("rms_norm", "metal")
