# SPDX-License-Identifier: MIT
"""Processes on this machine, one launch for all checks: what is split gives what one process gives.

`python -m tests.distributed.test_distributed` writes the table of docs/distributed.md.
"""

import re
from pathlib import Path

from tests.distributed.launch import ALLOWED, Outcome, run

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
MODULES = (
    *("ops", "functions", "training", "optimizers", "parallel", "losses"),
    *("linear_algebra", "sequences", "checkpoints"),
)
# What four processes show that two do not.
OF_FOUR = (
    *("two_dimensional", "fsdp2_clip_norm", "tsqr", "ring", "exact", "bytes", "fsdp2_muon"),
    *("rounding", "infinite"),
)


def _expect_right(outcomes: dict[str, Outcome]) -> None:
    errors = "\n".join(f"{name}: {e}" for name, o in outcomes.items() for e in o.errors)
    assert not errors, errors
    # a check that returns a float tells how far it is from one process
    off = {n: max(o.values) for n, o in outcomes.items() if isinstance(o.values[0], float)}
    assert off
    assert all(value <= ALLOWED for value in off.values()), off


def test_two_processes() -> None:
    outcomes = run(2, *MODULES)
    _expect_right(outcomes)
    assert outcomes["ops.all_ops"].values[0] > 500
    assert set(_rows(PAGE.read_text())) == set(_of_table(outcomes))


def test_four_processes() -> None:
    outcomes = run(4, *MODULES, only=",".join(OF_FOUR))
    _expect_right(outcomes)
    assert len(outcomes) >= len(OF_FOUR)


def _of_table(outcomes: dict[str, Outcome]) -> dict[str, str]:
    """The rows of the table: what, and how far from one process."""
    found = {}
    for name, o in outcomes.items():
        module, _, what = name.partition(".")
        if module in ("training", "parallel", "checkpoints") and isinstance(o.values[0], float):
            found[what.replace("_", " ")] = f"{max(o.values):.0e}"
    return found


def _rows(page: str) -> list[str]:
    table = page.partition("<!-- checks -->")[2].partition("<!-- end -->")[0]
    return re.findall(r"^\| ([\w ]+) \| [\de.+-]+ \|$", table, re.MULTILINE)


def _write() -> None:
    outcomes = run(2, *MODULES) | run(4, *MODULES, only="two_dimensional")
    _expect_right(outcomes)
    lines = ["", "| what | off by |", "|---|---|"]
    lines += [f"| {what} | {off} |" for what, off in _of_table(outcomes).items()]
    head, _, rest = PAGE.read_text().partition("<!-- checks -->")
    _, _, tail = rest.partition("<!-- end -->")
    PAGE.write_text(head + "<!-- checks -->" + "\n".join(lines) + "\n\n<!-- end -->" + tail)
    for name, o in outcomes.items():
        print(f"{name}: {o.values[0]} in {o.seconds:.1f} s")


if __name__ == "__main__":
    _write()
