# SPDX-License-Identifier: MIT
"""The structs of a source that hold numbers, vectors and pointers: what a host program fills in."""

from __future__ import annotations

from ..text.tokens import ADDRESS_SPACES, Stream, split_top_level
from .constants import integer_value

# Name, type and number of elements of a member; 0 elements: no array. A pointer's type ends in *.
Member = tuple[str, str, int]
_NO_MEMBER = frozenset({"static", "using", "typedef", "template", "friend", "enum", "union"})
_QUALIFIERS = ADDRESS_SPACES | {"const", "volatile", "struct", "atomic"}
_ACCESS = frozenset({"public", "private", "protected"})


def find_structs(s: Stream) -> dict[str, list[Member]]:
    """Members by the name of the struct, of those that have nothing but members and functions."""
    structs: dict[str, list[Member]] = {}
    for i, token in enumerate(s.tokens):
        if token.kind != "word" or token.text != "struct":
            continue
        opening = s.after(i)
        name = s[opening] if s[opening] != "{" else ""
        opening = s.after(opening) if name else opening
        if s[opening] != "{":
            continue
        closing = s.closing(opening)
        # typedef struct { ... } name;
        alias = s[s.after(closing)]
        members = _members(s, opening, closing)
        for known in {name, alias if s[s.before(i)] == "typedef" else ""} - {""}:
            if members is not None:
                structs[known] = members
    return structs


def _members(s: Stream, opening: int, closing: int) -> list[Member] | None:
    members: list[Member] = []
    k = s.after(opening)
    while k < closing:
        end = k
        while end < closing and s[end] not in (";", "{"):
            end = s.closing(end) + 1 if s[end] in ("(", "[[") else end + 1
        if s[end] == "{":
            if "(" not in (s[p] for p in s.code(k, end)):
                return None
            end = s.closing(end)
            k = s.after(s.after(end)) if s[s.after(end)] == ";" else s.after(end)
            continue
        found = _declared(s, k, end)
        if found is None:
            return None
        members += found
        k = s.after(end)
    return members


def _declared(s: Stream, begin: int, end: int) -> list[Member] | None:
    """The members of one declaration; None where it is beyond this reader."""
    words, skip_to = [], -1
    for k in s.code(begin, end):
        if s[k] == "[[":
            skip_to = s.closing(k)
        if k > skip_to:
            words.append(k)
    texts = [s[k] for k in words]
    if not texts or texts[0] in _ACCESS or "(" in texts or _NO_MEMBER.intersection(texts):
        return [] if texts and ("(" in texts or texts[0] in _ACCESS) else None
    plain = [k for k in words if s[k] not in _QUALIFIERS]
    if len(plain) < 2 or "<" in texts or "::" in texts:
        return None
    base = s[plain[0]]
    members: list[Member] = []
    for part in split_top_level((k, s[k]) for k in plain[1:]):
        names = [k for k in part if s.tokens[k].kind == "word"]
        if not names:
            return None
        pointer = "*" if s[part[0]] == "*" else ""
        count = 1 if "[" in (s[k] for k in part) else 0
        for k in part:
            if s[k] == "[":
                size = integer_value(s, s.text(k + 1, s.closing(k)))
                if size is None:
                    return None
                count *= size
        members.append((s[names[0]], base + pointer, count))
    return members
