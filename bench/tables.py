# SPDX-License-Identifier: MIT
"""Tables of the documents that are written from a run."""

from collections.abc import Sequence

from metalcore._report import number

from .harness import Row
from .patch.overrides import DECLINED, WHEN


def overrides(rows: Sequence[Row]) -> str:
    """What overrides replace, when, and by how much: ratios torch / overridden."""
    head = ["function", "taken from", "shape", "forward", "forward+backward", "declined"]
    lines = [head, ["---"] * len(head)]
    for op in dict.fromkeys(row.op.partition(" ")[0] for row in rows):
        name = op.rpartition("/")[2]
        taken = [row for row in rows if row.op == op]
        lines.append(
            [
                f"`{name}`",
                WHEN[name],
                taken[0].shape,
                _ratios(taken),
                _ratios([row for row in rows if row.op == f"{op} (forward+backward)"]),
                _ratios([row for row in rows if row.op == f"{op} ({DECLINED})"], dtype=False),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _ratios(rows: Sequence[Row], dtype: bool = True) -> str:
    cells = ["-" if row.ratio is None else number(row.ratio) for row in rows]
    if dtype:
        cells = [f"{cell} {row.dtype}" for cell, row in zip(cells, rows, strict=True)]
    return ", ".join(cells) or "-"
