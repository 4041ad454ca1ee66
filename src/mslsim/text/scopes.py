# SPDX-License-Identifier: MIT
"""Which braces of a token stream are functions, types, namespaces or plain blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .tokens import Stream

_NOT_FUNCTIONS = frozenset({"if", "for", "while", "switch", "catch", "sizeof", "decltype"})
_AFTER_PARAMETERS = frozenset(
    {"const", "constant", "thread", "device", "threadgroup", "noexcept", "override", "final"}
)


@dataclass(slots=True)
class Function:
    """A function with a body, by token positions: parameters in (parens, close), then the body."""

    name: str
    name_at: int
    parens: int
    close: int
    begin: int
    end: int
    is_template: bool
    in_type: bool


@dataclass(slots=True)
class Scopes:
    functions: list[Function]
    # First tokens of the statements that stand in a namespace, outside any body.
    program_statements: list[int]


def functions_reaching(
    s: Stream, functions: list[Function], is_wanted: Callable[[int], bool]
) -> set[str]:
    """Names of functions from whose bodies a wanted token seems to be reached, by the names they
    mention. Functions of one name are taken together, and so are all operators."""
    words = _mentioned(s, functions)
    reaching = {f.name for f in functions if any(map(is_wanted, range(f.begin, f.end)))}
    while more := {f for f, mentioned in words.items() if mentioned & reaching} - reaching:
        reaching |= more
    return reaching


def functions_reached(s: Stream, functions: list[Function], start: set[str]) -> set[str]:
    """Names of functions that seem to be reached from those in `start`, or from what stands
    outside of all functions. Operators and methods always are."""
    words, begins = _mentioned(s, functions), {f.begin: f.end for f in functions}
    reached = start | {"operator"} | {f.name for f in functions if f.in_type}
    names, k = {f.name_at for f in functions}, 0
    while k < len(s):
        if k not in names:
            reached.add(s[k])
        k = begins.get(k, k) + 1
    while more := set[str]().union(*(words.get(f, ()) for f in reached & words.keys())) - reached:
        reached |= more
    return reached


def _mentioned(s: Stream, functions: list[Function]) -> dict[str, set[str]]:
    """The words in the bodies of functions, by name."""
    words: dict[str, set[str]] = {}
    for f in functions:
        words.setdefault(f.name, set()).update(s[k] for k in range(f.begin, f.end))
    return words


def find_scopes(s: Stream) -> Scopes:
    """All functions, lambdas excepted, and the statements at program scope."""
    found = Scopes([], [])
    open_kinds: list[str] = []
    fresh = outside = True
    for i, token in enumerate(s.tokens):
        if not token.is_code:
            continue
        if outside and fresh and token.text not in ("}", ";"):
            found.program_statements.append(i)
            fresh = False
        if token.kind != "mark":
            continue
        if token.text == "{":
            kind = _kind(s, i, open_kinds, found)
            open_kinds.append(kind)
            outside = outside and kind == "namespace"
            fresh = fresh or outside
        elif token.text == "}":
            kind = open_kinds.pop() if open_kinds else ""
            # After a type comes `;`, after anything else a new statement.
            if kind in ("function", "namespace"):
                fresh = True
            outside = all(k == "namespace" for k in open_kinds)
        elif token.text == ";" and outside:
            fresh = True
    return found


def _kind(s: Stream, brace: int, open_kinds: list[str], found: Scopes) -> str:
    if "function" in open_kinds or "block" in open_kinds:
        return "block"
    start = s.statement_start(brace)
    header = s.code(start, brace)
    angle = 0
    for k in header:
        text = s[k]
        if text == "<":
            angle += 1
        elif text == ">":
            angle -= 1
        elif angle <= 0:
            if text == "namespace" or (text == "extern" and k in header[-2:]):
                return "namespace"
            if text in ("struct", "class", "union", "enum"):
                return "type"
            if text in ("(", "="):
                break
    function = _function(s, start, brace, header)
    if function is None:
        return "block"
    function.in_type = "type" in open_kinds
    found.functions.append(function)
    return "function"


def _function(s: Stream, start: int, brace: int, header: list[int]) -> Function | None:
    """The function whose body opens at `brace`, if it is one."""
    k, is_template = start, False
    while k < brace:
        text = s[k]
        if text == "[[":
            k = s.closing(k)
        elif text == "template":
            is_template = True
            k = s.closing(s.after(k))
        elif text in ("__attribute__", "alignas", "decltype"):
            k = s.closing(s.after(k))
        elif text == "=":
            return None
        elif text == "operator":
            k = s.after(k)
            if s[k] == "(":
                k = s.after(k)
            while s[s.after(k)] != "(" and k < brace:
                k = s.after(k)
        elif text == "(":
            break
        k = s.after(k)
    if k >= brace:
        return None
    name_at = s.before(k)
    name = s[name_at] if s.tokens[name_at].kind == "word" else "operator"
    if "operator" in (s[p] for p in header if p < k):
        name = "operator"
    if name in _NOT_FUNCTIONS:
        return None
    close = s.closing(k)
    return Function(name, name_at, k, close, brace, s.closing(brace), is_template, False)
