# SPDX-License-Identifier: MIT
"""Two processes, one launch: everything that is sharded gives what one process gives."""

from tests.distributed.launch import Outcome, run

MODULES = ("ops",)


def failures(outcomes: dict[str, Outcome]) -> str:
    return "\n".join(f"{name}: {e}" for name, o in outcomes.items() for e in o.errors)


def test_two_processes() -> None:
    outcomes = run(2, *MODULES)
    assert outcomes
    assert not failures(outcomes), failures(outcomes)
    assert outcomes["ops.all_ops"].values[0] > 500
