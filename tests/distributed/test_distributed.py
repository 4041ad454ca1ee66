# SPDX-License-Identifier: MIT
"""Two processes, one launch: everything that is sharded gives what one process gives."""

from tests.distributed.launch import ALLOWED, Outcome, run

MODULES = ("ops", "training")


def failures(outcomes: dict[str, Outcome]) -> str:
    return "\n".join(f"{name}: {e}" for name, o in outcomes.items() for e in o.errors)


def test_two_processes() -> None:
    outcomes = run(2, *MODULES)
    assert outcomes
    assert not failures(outcomes), failures(outcomes)
    assert outcomes["ops.all_ops"].values[0] > 500
    # checks that return a float tell how far they are from one process
    off = {n: max(o.values) for n, o in outcomes.items() if isinstance(o.values[0], float)}
    assert all(value <= ALLOWED for value in off.values()), off
