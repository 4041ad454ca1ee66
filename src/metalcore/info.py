# SPDX-License-Identifier: MIT
"""`metalcore info`: what an op takes and where it runs."""

from typing import Any

from metalcore import _where
from metalcore._check import one_of
from metalcore._op import Op
from metalcore._policy import policy

BACKENDS = ("cpu", "metal")
DTYPES = ("float32", "float64", "float16", "bfloat16")


def names() -> list[str]:
    return list(Op.all)


def describe(name: str) -> dict[str, Any]:
    """Schema, kernels and policy of op `name`."""
    if name not in Op.all:
        raise ValueError(f"info: OP must be the name of an op, {one_of(Op.all, [name])}")
    op = Op.all[name]
    stem = op.story.split("/")[1]
    return {
        "op": name,
        "files": op.story,
        "schema": op.schema,
        "backends": {b: _where.kernel_dtypes(op, b) for b in BACKENDS},
        "policy": {b: policy(stem, b) for b in BACKENDS},
    }


def table() -> list[list[str]]:
    """A row per op: its name, then the dtypes of its kernels per backend."""
    rows = []
    for name, op in sorted(Op.all.items()):
        dtypes = {b: _where.kernel_dtypes(op, b) for b in BACKENDS}
        marks = ["yes" if d in dtypes[b] else "-" for b in BACKENDS for d in DTYPES]
        rows.append([f"`{name}`", *marks])
    return rows


def markdown() -> str:
    """`table()` as it stands in docs/ops.md."""
    head = ["op", *(f"{b} {d}" for b in BACKENDS for d in DTYPES)]
    lines = [head, ["---"] * len(head), *table()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
