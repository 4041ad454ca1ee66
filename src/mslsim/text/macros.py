# SPDX-License-Identifier: MIT
"""Macros of a source, expanded without a compiler: enough to find kernels and read their heads.

Knows the `#define` lines of the source itself. Conditional lines are all read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .tokens import Stream, Token, split_top_level, tokenize

_DEFINE = re.compile(r"#\s*define\s+(\w+)(?:\(([^)]*)\))?(.*)", re.DOTALL)
_INDENTED = re.compile(r"^([ \t]+)#", re.MULTILINE)
_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|\s*##\s*|#\s*(\w+)|[A-Za-z_]\w*')


@dataclass(slots=True)
class Macro:
    parameters: list[str] | None
    body: str

    def filled(self, arguments: list[str]) -> str:
        """The body with the arguments in it."""
        names = self.parameters or []
        if names and names[-1] == "...":
            arguments = [*arguments[: len(names) - 1], ",".join(arguments[len(names) - 1 :])]
            names = [*names[:-1], "__VA_ARGS__"]
        given = dict(zip(names, arguments, strict=False))

        def fill(piece: re.Match[str]) -> str:
            if piece[1]:
                return f'"{given.get(piece[1], piece[1])}"'
            return "" if piece[0].strip() == "##" else given.get(piece[0], piece[0])

        return _PIECE.sub(fill, self.body)


def expanded(text: str) -> Stream:
    """The tokens of `text`, which no preprocessor has seen, with its macros expanded."""
    return Stream(_expand(tokenize(_INDENTED.sub(r"#\1", text)), {}))


def _expand(tokens: list[Token], macros: dict[str, Macro]) -> list[Token]:
    out: list[Token] = []
    s = Stream(tokens)
    i = 0
    while i < len(tokens):
        token = tokens[i]
        if token.kind == "hash":
            _define(token.text, macros)
        elif token.kind == "word" and token.text in macros:
            macro, end = macros[token.text], i
            if macro.parameters is not None:
                opening = s.after(i)
                end = s.closing(opening) if s[opening] == "(" else -1
            if end >= 0:
                place = (token.file, token.line, token.begin, tokens[end].end)
                filled = tokenize(macro.filled(_arguments(s, i, end)))
                others = {name: m for name, m in macros.items() if name != token.text}
                out += _expand([Token(t.kind, t.text, *place) for t in filled], others)
                i = end + 1
                continue
        out.append(token)
        i += 1
    return out


def _define(line: str, macros: dict[str, Macro]) -> None:
    found = _DEFINE.match(line)
    if found:
        parameters = None if found[2] is None else [p.strip() for p in found[2].split(",")]
        macros[found[1]] = Macro(parameters, found[3].replace("\\\n", " "))


def _arguments(s: Stream, name: int, end: int) -> list[str]:
    """The texts between the commas of a macro's call, for which `<` is no bracket."""
    inside = ((k, s[k] if s[k] not in ("<", ">") else "") for k in range(s.after(name) + 1, end))
    parts = split_top_level(inside)
    return [s.text(part[0], part[-1] + 1).strip() if part else "" for part in parts]
