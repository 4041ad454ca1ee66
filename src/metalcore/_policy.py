# SPDX-License-Identifier: MIT
"""Launch policy: the tuned numbers of an op, read from TOML.

The defaults are in `ops/<family>/<op>.toml`, one table per backend. A user's file overrides single
values: `$METALCORE_POLICY`, else `~/.config/metalcore/policy.toml`, with tables `[<op>.<backend>]`.
"""

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from metalcore import _native
from metalcore._check import expect

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Values = dict[str, Any]

_OPS = Path(__file__).parent / "ops"


def user_file() -> Path:
    default = Path.home() / ".config" / "metalcore" / "policy.toml"
    return Path(os.environ.get("METALCORE_POLICY", default))


@cache
def policy(op: str, backend: str) -> Values:
    """The policy of `op` on `backend`, with the user's values in place of the packaged ones."""
    values = dict(_packaged(op).get(backend, {}))
    for key, value in _user(user_file()).get(op, {}).get(backend, {}).items():
        where = f"{user_file()} [{op}.{backend}]"
        expect(key in values, op, f"{where} sets {key}, which is none of {', '.join(values)}")
        expect(
            type(value) is type(values[key]),
            op,
            f"{where} {key} must be of type {type(values[key]).__name__}, got {value!r}",
        )
        values[key] = value
    return values


def tune_cpu_kernels() -> None:
    """Give the compiled kernels the numbers of every `[cpu]` table."""
    for file in sorted(_OPS.glob("*/*.toml")):
        for name, value in policy(file.stem, "cpu").items():
            _native.set_knob(file.stem, name, value)


def _packaged(op: str) -> dict[str, Values]:
    files = list(_OPS.glob(f"*/{op}.toml"))
    return tomllib.loads(files[0].read_text()) if files else {}


@cache
def _user(path: Path) -> dict[str, dict[str, Values]]:
    return tomllib.loads(path.read_text()) if path.exists() else {}
