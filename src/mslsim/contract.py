# SPDX-License-Identifier: MIT
"""Fuses each a * b + c of a module that may be, also where the product is used elsewhere.

A compiler does so as it likes; results must not depend on it.
"""

from __future__ import annotations

import re

_TYPE = r"(?:half|float|<\d+ x (?:half|float)>)"
_PRODUCT = re.compile(
    rf"^  (%[-\w.$]+) = fmul (?:\w+ )*?contract (?:\w+ )*?({_TYPE}) (.+?), ([^,!]+)"
)
_SUM = re.compile(
    rf"^  (%[-\w.$]+) = (fadd|fsub) ((?:\w+ )*?contract (?:\w+ )*?)({_TYPE}) (.+?), ([^,!]+)(.*)$"
)


def fuse_all(ir: str) -> str:
    """`ir` with calls of `llvm.fma` for sums of products that both have the flag `contract`."""
    lines: list[str] = []
    products: dict[str, tuple[str, str]] = {}
    used: set[str] = set()
    for line in ir.splitlines():
        if line.startswith("define "):
            products.clear()
        product, total = _PRODUCT.match(line), _SUM.match(line)
        if product:
            products[product[1]] = (product[3].strip(), product[4].strip())
        if total:
            lines += _fused(total, products, used) or [line]
        else:
            lines.append(line)
    known = "\n".join(lines)
    declarations = [_declaration(t) for t in sorted(used)]
    return "\n".join([known, *(d for d in declarations if d not in known), ""])


def _fused(total: re.Match[str], products: dict[str, tuple[str, str]], used: set[str]) -> list[str]:
    """The lines that take the place of a sum; none where neither side is a product."""
    name, kind, _, type, x, y, rest = (part.strip() for part in total.groups())
    negated = f"{name[:1]}negated.{name[1:]}"
    lines = []
    if x in products:
        (a, b), c = products[x], y
        if kind == "fsub":
            lines, c = [f"  {negated} = fneg {type} {y}"], negated
    elif y in products:
        (a, b), c = products[y], x
        if kind == "fsub":
            lines, a = [f"  {negated} = fneg {type} {a}"], negated
    else:
        return []
    used.add(type)
    call = f"call {type} @{_intrinsic(type)}({type} {a}, {type} {b}, {type} {c})"
    return [*lines, f"  {name} = {call}{rest}"]


def _intrinsic(type: str) -> str:
    vector = re.match(r"<(\d+) x (\w+)>", type)
    scalar = {"half": "f16", "float": "f32"}
    return f"llvm.fma.v{vector[1]}{scalar[vector[2]]}" if vector else f"llvm.fma.{scalar[type]}"


def _declaration(type: str) -> str:
    return f"declare {type} @{_intrinsic(type)}({type}, {type}, {type})"
