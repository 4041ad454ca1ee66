# SPDX-License-Identifier: MIT
"""Address spaces: every pointer and reference names one, and they are not mixed.

The check knows the types that are declared in the source and the simple forms of a pointer
expression (a name, a name plus an offset, the address of an element). It leaves templates' own type
names alone, so it misses some errors and invents none.
"""

from __future__ import annotations

import re

from ..report import Finding
from ..text.scopes import Function, Scopes
from ..text.tokens import ADDRESS_SPACES, Stream, split_top_level

_SCALARS = "bool|char|uchar|short|ushort|int|uint|long|ulong|half|bfloat|float"
_BUILT_IN = re.compile(
    rf"^(?:(?:packed_)?(?:{_SCALARS})[234]?|(?:float|half)[234]x[234]|u?int(?:8|16|32|64)_t|size_t"
    r"|ptrdiff_t|atomic_(?:int|uint|float|bool|ulong)|void)$"
)
_QUALIFIERS = frozenset(
    {"const", "volatile", "restrict", "__restrict", "signed", "unsigned", "struct"}
)
_AFTER_NAME = frozenset({"=", ";", ",", ")", "[", ":", "[["})


def pointer_findings(s: Stream, scopes: Scopes) -> list[Finding]:
    """Findings of kind "strict" about pointers."""
    types = _declared_types(s)
    findings = _missing_spaces(s, types)
    signatures = _signatures(s, scopes)
    for function in scopes.functions:
        findings += _mixed_spaces(s, function, signatures)
    return findings


def _finding(s: Stream, at: int, message: str) -> Finding:
    token = s.tokens[at]
    return Finding("strict", message, "", token.file, token.line)


def _declared_types(s: Stream) -> set[str]:
    """Names of structs, classes and type aliases, less those that templates use for their own."""
    types, parameters = set(), set()
    for i, token in enumerate(s.tokens):
        if token.kind != "word":
            continue
        name = s[s.after(i)]
        if not name.isidentifier():
            continue
        if token.text in ("struct", "class", "union") and s[s.before(i)] not in ("<", ","):
            types.add(name)
        elif token.text in ("typename", "class"):
            parameters.add(name)
    return types - parameters


def _missing_spaces(s: Stream, types: set[str]) -> list[Finding]:
    findings = []
    for i, token in enumerate(s.tokens):
        if token.kind != "mark" or token.text not in ("*", "&"):
            continue
        type_at = s.before(i)
        while s[type_at] in _QUALIFIERS | ADDRESS_SPACES:
            type_at = s.before(type_at)
        name = s[type_at]
        if not (_BUILT_IN.match(name) or name in types) or s[s.before(type_at)] in (
            ".",
            "->",
            "::",
        ):
            continue
        if not _declares(s, i):
            continue
        words, k = [s[p] for p in s.code(type_at, i)], s.before(type_at)
        while s[k] in _QUALIFIERS | ADDRESS_SPACES:
            words.append(s[k])
            k = s.before(k)
        if not ADDRESS_SPACES.intersection(words):
            what = "pointer" if token.text == "*" else "reference"
            findings.append(
                _finding(s, i, f"{what} type must have explicit address space qualifier")
            )
    return findings


def _declares(s: Stream, star: int) -> bool:
    """Whether the `*` or `&` after a type belongs to a declaration or a cast."""
    following = s.after(star)
    if s[star] == "*" and s[following] == ")":
        return True
    while s[following] in ("const", "restrict", "__restrict"):
        following = s.after(following)
    if s.tokens[following].kind != "word" if following < len(s) else True:
        return False
    return s[s.after(following)] in _AFTER_NAME


def _space_of(s: Stream, part: list[int]) -> tuple[str, str] | None:
    """(name, address space) of a declared pointer or array, from the tokens of its declaration."""
    texts = [s[k] for k in part]
    for stop in ("=", "[["):
        if stop in texts:
            texts = texts[: texts.index(stop)]
    is_array = "[" in texts
    head = texts[: texts.index("[")] if is_array else texts
    # not `f(a, b[i])`
    if not head or not head[-1].isidentifier() or "(" in head:
        return None
    spaces = [t for t in head if t in ADDRESS_SPACES]
    if "*" in head or "&" in head:
        return (head[-1], spaces[0]) if spaces else None
    # not `sum += x[i]`
    if is_array and len(head) >= 2 and not any("=" in t for t in head):
        return head[-1], spaces[0] if spaces else "thread"
    return None


def _signatures(s: Stream, scopes: Scopes) -> dict[str, list[str | None]]:
    """Address spaces of pointer parameters, for free functions that are not overloaded."""
    groups: dict[str, list[Function]] = {}
    for function in scopes.functions:
        groups.setdefault(function.name, []).append(function)
    signatures = {}
    for name, group in groups.items():
        if len(group) == 1 and not group[0].in_type:
            f = group[0]
            parts = split_top_level((k, s[k]) for k in s.code(f.parens + 1, f.close))
            found = [_space_of(s, p) if "*" in [s[k] for k in p] else None for p in parts]
            signatures[name] = [f[1] if f else None for f in found]
    return signatures


def _mixed_spaces(
    s: Stream, function: Function, signatures: dict[str, list[str | None]]
) -> list[Finding]:
    known: dict[str, str] = {}
    for part in split_top_level((k, s[k]) for k in s.code(function.parens + 1, function.close)):
        entry = _space_of(s, part)
        if entry:
            known[entry[0]] = entry[1]
    findings = []
    for k in s.code(function.begin + 1, function.end):
        if s[s.before(k)] in (";", "{", "}"):
            findings += _declaration(s, k, function.end, known)
        if s[k] in signatures and s[s.after(k)] == "(" and s[s.before(k)] not in (".", "->", "::"):
            findings += _call(s, k, known, signatures[s[k]])
    return findings


def _declaration(s: Stream, start: int, limit: int, known: dict[str, str]) -> list[Finding]:
    if s.tokens[start].kind != "word" or s[start] in ("return", "if", "for", "while", "else"):
        return []
    end = start
    while end < limit and s[end] not in (";", "{", "}"):
        end += 1
    part = s.code(start, end)
    entry = _space_of(s, part)
    if entry is None:
        return []
    name, space = entry
    texts = [s[k] for k in part]
    findings = []
    if "=" in texts and "*" in texts[: texts.index("=")]:
        value = part[texts.index("=") + 1 :]
        given = _pointer_space(s, value, known)
        if given and given != space:
            message = f"cannot initialize a {space} pointer with a {given} pointer"
            findings.append(_finding(s, part[0], message))
    known[name] = space
    return findings


def _call(s: Stream, at: int, known: dict[str, str], wanted: list[str | None]) -> list[Finding]:
    opening = s.after(at)
    parts = split_top_level((k, s[k]) for k in s.code(opening + 1, s.closing(opening)))
    findings = []
    for space, part in zip(wanted, parts, strict=False):
        given = _pointer_space(s, part, known)
        if space and given and given != space:
            message = f"cannot pass a {given} pointer to a {space} pointer parameter of '{s[at]}'"
            findings.append(_finding(s, at, message))
    return findings


def _pointer_space(s: Stream, value: list[int], known: dict[str, str]) -> str | None:
    """Address space of a simple pointer expression, None where that is not plain to see."""
    texts = [s[k] for k in value]
    if not texts:
        return None
    if texts[0] == "&":
        return (
            known.get(texts[1]) if len(texts) > 2 and texts[2] == "[" and texts[-1] == "]" else None
        )
    if len(texts) == 1 or texts[1] in ("+", "-"):
        return known.get(texts[0]) if "," not in texts and "?" not in texts else None
    return None
