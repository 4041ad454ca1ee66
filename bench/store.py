# SPDX-License-Identifier: MIT
"""Figures as data: `bench/results/<machine class>.json`, which the documents are written from."""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from metalcore import _native, _policy

from .harness import Row
from .machine import Machine

FOLDER = Path(__file__).resolve().parent / "results"

# Significant digits; the rest of a measured number is noise.
_DIGITS = {"limit_fraction": 2, "max_error": 2}
# What rows of one file have in common.
_SAME = ("processor", "cores", "threads", "torch")


@dataclass(frozen=True)
class Results:
    """The rows of a machine, by op, each in the order it was measured in."""

    machine: Machine
    rows: list[Row]


def load() -> dict[str, Results]:
    """What is stored, by machine class."""
    return {file.stem: _read(file) for file in sorted(FOLDER.glob("*.json"))}


def check(machine: Machine, whole: bool) -> None:
    """Raise a ValueError if figures of this machine cannot be stored; `whole` is a run of all."""
    file = _file(machine)
    if whole or not file.exists():
        return
    stored = _read(file).machine
    other = [name for name in _SAME if getattr(stored, name) != getattr(machine, name)]
    if other:
        raise ValueError(
            f"bench: {file.name} was measured with "
            + ", ".join(f"{name} {getattr(stored, name)}" for name in other)
            + ", here it is "
            + ", ".join(str(getattr(machine, name)) for name in other)
            + "; store all benchmarks, not a selection"
        )


def add(machine: Machine, rows: Sequence[Row], titles: Collection[str], whole: bool) -> Path:
    """Store `rows` in place of those of the benchmarks `titles`, or of all."""
    file = _file(machine)
    kept = [] if whole or not file.exists() else _read(file).rows
    kept = [row for row in kept if row.op not in titles]
    found = sorted([*kept, *filter(_says_something, rows)], key=lambda row: row.op)
    lines = ",\n".join(f"  {json.dumps(_fields(row))}" for row in found)
    about = json.dumps(asdict(machine), indent=1)
    FOLDER.mkdir(exist_ok=True)
    file.write_text(f'{{\n"machine": {about},\n"rows": [\n{lines}\n]\n}}\n')
    return file


def _file(machine: Machine) -> Path:
    if not (FOLDER.parent.parent / "pyproject.toml").exists():
        raise ValueError(
            "bench: figures are stored in a checkout of metalcore, not where it is installed"
        )
    if _native.isa is None:
        raise ValueError(f"bench: there are no compiled kernels to measure: {_native.problem}")
    name = "metal" if machine.device == "mps" else _policy.machine_class()
    return FOLDER / f"{name}.json"


def _read(file: Path) -> Results:
    content = json.loads(file.read_text())
    fields = dict.fromkeys(Row.__dataclass_fields__)
    return Results(Machine(**content["machine"]), [Row(**fields | r) for r in content["rows"]])


def _says_something(row: Row) -> bool:
    """Not so where a peer is not installed, or does not take this case."""
    wrong = isinstance(row.peer_ms, str) and row.peer_ms.startswith("skipped")
    return row.ratio is not None or isinstance(row.ms, str) or wrong


def _fields(row: Row) -> dict[str, Any]:
    return {
        key: float(f"{value:.{_DIGITS.get(key, 3)}g}") if isinstance(value, float) else value
        for key, value in asdict(row).items()
        if value is not None
    }
