# SPDX-License-Identifier: MIT
"""Declarations of threadgroup memory."""

from __future__ import annotations

from dataclasses import dataclass

from .tokens import ADDRESS_SPACES, Stream, split_top_level

# Where `threadgroup` says of a method which objects it is for.
_AFTER_METHOD = frozenset({"=", "{", ";", ":", "const", "noexcept"})


@dataclass(slots=True)
class Storage:
    """`threadgroup T a[N], b;`: the type, each declarator from its name on, and where `;` is."""

    type: str
    declarators: list[list[int]]
    end: int


def threadgroup_storage(s: Stream, i: int) -> Storage | None:
    """What the `threadgroup` at `i` declares; None where it qualifies a pointer or a parameter."""
    previous = s.before(i)
    if s[previous] in ("const", "static", "volatile"):
        previous = s.before(previous)
    if s[previous] not in (";", "{", "}", ")", ":", "") or s[s.after(i)] in _AFTER_METHOD:
        return None
    end = s.statement_end(i)
    parts = split_top_level((k, s[k]) for k in s.code(i + 1, end))
    aligned, first = _aligned(s, [k for k in parts[0] if s[k] not in ADDRESS_SPACES])
    at = _declared_name(s, first)
    if at is None or any(s[k] in ("*", "&", "&&", "(") for k in first[:at]):
        return None
    declarators = [part for part in [first[at:], *parts[1:]] if part]
    return Storage(" ".join([*aligned, *(s[k] for k in first[:at])]), declarators, end)


def _aligned(s: Stream, part: list[int]) -> tuple[list[str], list[int]]:
    """What `part` says of alignment before its type, as an attribute of that, and the rest."""
    said = []
    while part and s[part[0]] in ("alignas", "__attribute__"):
        opening = part[1]
        inside = s.text(opening, s.closing(opening) + 1)
        said.append(inside if s[part[0]] == "__attribute__" else f"((aligned{inside}))")
        part = [k for k in part if k > s.closing(opening)]
    return [f"__attribute__{text}" for text in said], part


def _declared_name(s: Stream, part: list[int]) -> int | None:
    """Offset in `part` of the declared name: the last word before `[`, `=` or the end."""
    angle, name = 0, None
    for offset, k in enumerate(part):
        if s[k] == "<":
            angle += 1
        elif s[k] == ">":
            angle -= 1
        elif angle == 0 and s[k] == "(" and s[part[offset + 1]] in ("*", "&"):
            # a pointer or a reference to an array
            return None
        elif angle == 0 and s[k] in ("[", "=", "(", "{"):
            break
        elif angle == 0 and s.tokens[k].kind == "word":
            name = offset
    return name
