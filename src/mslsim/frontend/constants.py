# SPDX-License-Identifier: MIT
"""Integers that a source writes as expressions: the numbers of function constants."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

from ..text.tokens import Stream

_SUFFIX = re.compile(r"\b(\d+)[uUlL]+\b")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
    ast.BitOr: operator.or_,
}


def constant_index(s: Stream, begin: int, end: int) -> int | None:
    """The number in `[[function_constant(n)]]`: an expression of numbers and constants."""
    for k in s.code(begin, end):
        if s[k] == "function_constant":
            opening = s.after(k)
            return integer_value(s, s.text(opening + 1, s.closing(opening)))
    return None


def integer_value(s: Stream, text: str) -> int | None:
    """What an expression of integers is, with names as the source defines them; None where it is
    no such expression."""
    try:
        return _integer(s, _parsed(text))
    except (SyntaxError, ValueError, RecursionError):
        return None


def _parsed(text: str) -> ast.expr:
    return ast.parse(_SUFFIX.sub(r"\1", text.strip()), mode="eval").body


def _integer(s: Stream, node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_integer(s, node.left), _integer(s, node.right))
    if isinstance(node, ast.Name):
        for i, token in enumerate(s.tokens):
            if token.text == node.id and s[s.after(i)] == "=":
                return _integer(s, _parsed(s.text(s.after(i) + 1, s.statement_end(i))))
    raise ValueError(ast.dump(node))
