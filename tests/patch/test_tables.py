# SPDX-License-Identifier: MIT
"""The table of what overrides replace is the one that a run prints."""

from pathlib import Path

from metalcore.bench import tables
from metalcore.bench.harness import Row
from metalcore.bench.patch.overrides import BENCHES, WHEN

ROOT = Path(__file__).parent.parent.parent


def _row(op: str, dtype: str, ratio: float | None) -> Row:
    return Row(op, "4x5", dtype, "cpu:avx2", "", 1.0, "torch", 2.0, ratio, None, None, None)


def test_a_line_has_all_of_a_function() -> None:
    rows = [
        _row("patch/silu", "float32", 2.0),
        _row("patch/silu", "bfloat16", None),
        _row("patch/silu (forward+backward)", "float32", 1.5),
        _row("patch/silu (declined)", "float32", 0.9),
    ]
    line = tables.overrides(rows).splitlines()[2]
    when = WHEN["silu"]
    assert line == f"| `silu` | {when} | 4x5 | 2.00 float32, - bfloat16 | 1.50 float32 | 0.900 |"


def test_the_documents_have_the_sizes_that_are_in_force() -> None:
    titles = {bench.name for bench in BENCHES}
    assert titles == set(WHEN)
    documents = [(ROOT / name).read_text() for name in ("README.md", "docs/overrides.md")]
    for name, when in WHEN.items():
        lines = [
            [line for line in text.splitlines() if line.startswith(f"| `{name}` | {when} |")]
            for text in documents
        ]
        assert len(lines[0]) == 1, f"run metalcore bench patch --markdown for {name}"
        assert lines[0] == lines[1]
