# SPDX-License-Identifier: MIT
"""Tokens of Metal source, each with the file and line it came from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_PATTERN = re.compile(
    r"""
    (?P<space>[ \t\r\n\f]+)
  | (?P<hash>^\#(?:[^\n\\]|\\.)*)
  | (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
  | (?P<number>(?:0[xX][0-9a-fA-F']+|0[bB][01']+
      |(?:\d[\d']*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)[A-Za-z_]*)
  | (?P<word>[A-Za-z_]\w*)
  | (?P<mark>\[\[|<<=|->\*|->|\+\+|--|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|::|\.\.\.|.)
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
_LINE_MARKER = re.compile(r'#\s*(?:line\s*)?(\d+)\s+"((?:[^"\\]|\\.)*)"')
ADDRESS_SPACES = frozenset(
    {"device", "thread", "threadgroup", "constant", "ray_data", "object_data"}
)
ASSEMBLY = frozenset({"asm", "__asm", "__asm__"})
# Instructions that the machine has, by their names in the compiler's own language.
_AIR = re.compile(r'"air\.(simdgroup_async_copy_[12]d|wait_simdgroup_events)(?:\.p\di8\.p\di8)?"$')
_CLOSERS = {"(": ")", "{": "}", "[": "]"}


@dataclass(slots=True)
class Token:
    kind: str
    text: str
    file: str
    line: int
    # Where it is in the text; for a token out of a macro, where that is called.
    begin: int
    end: int

    @property
    def is_code(self) -> bool:
        return self.kind not in ("space", "hash", "comment")


class SyntaxProblem(Exception):
    """The source cannot be read as Metal: text and the token it was found at."""

    def __init__(self, message: str, token: Token) -> None:
        super().__init__(message)
        self.token = token


def tokenize(text: str) -> list[Token]:
    """Tokens of `text`, following the preprocessor's line markers."""
    tokens = []
    file, line = "?", 1
    for match in _PATTERN.finditer(text):
        kind, piece = match.lastgroup or "mark", match.group()
        tokens.append(Token(kind, piece, file, line, match.start(), match.end()))
        if kind == "hash":
            marker = _LINE_MARKER.match(piece)
            if marker:
                # The newline that ends the marker counts too.
                line, file = int(marker[1]) - 1, marker[2]
        else:
            line += piece.count("\n")
    return tokens


class Stream:
    """A list of tokens and the ways to move through it. Positions are indices into `tokens`."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> str:
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def after(self, i: int) -> int:
        """Position of the next code token after `i`."""
        i += 1
        while i < len(self.tokens) and not self.tokens[i].is_code:
            i += 1
        return i

    def before(self, i: int) -> int:
        """Position of the code token before `i`, or -1."""
        i -= 1
        while i >= 0 and not self.tokens[i].is_code:
            i -= 1
        return i

    def closing(self, i: int) -> int:
        """Position of the bracket that closes the one at `i`; `[[` closes at its second `]`."""
        opener = self[i]
        if opener == "[[":
            return self._closing_attribute(i)
        if opener == "<":
            return self._closing_angle(i)
        closer, depth = _CLOSERS[opener], 0
        for k in range(i, len(self.tokens)):
            token = self.tokens[k]
            if token.kind != "mark":
                continue
            if token.text == opener:
                depth += 1
            elif opener == "[" and token.text == "[[":
                depth += 2
            elif token.text == closer:
                depth -= 1
                if depth == 0:
                    return k
        raise SyntaxProblem(f"'{opener}' is never closed", self.tokens[i])

    def opening(self, i: int) -> int:
        """Position of the bracket that the one at `i` closes."""
        depth = 0
        for k in range(i, -1, -1):
            text = self[k]
            if text in (")", "]", "}"):
                depth += 1
            elif text in ("(", "[", "{", "[["):
                depth -= len(text)
                if depth <= 0:
                    return k
        raise SyntaxProblem(f"'{self[i]}' is never opened", self.tokens[i])

    def _closing_angle(self, i: int) -> int:
        """For the `<` of a template; what stands in other brackets does not count."""
        depth, k = 0, i
        while k < len(self.tokens):
            text = self[k]
            if text in ("(", "[", "{", "[["):
                k = self.closing(k)
            elif text == "<":
                # After a bracket or a number it compares: `enable_if_t<sizeof(T) < 8>`.
                before = self.tokens[self.before(k)]
                depth += depth == 0 or before.kind == "word"
            elif text in (">", ">="):
                # `>=` closes in `template <typename T, enable_if_t<...>=0>`.
                depth -= 1
                if depth == 0:
                    return k
            elif text == ";":
                break
            k += 1
        raise SyntaxProblem("'<' is never closed", self.tokens[i])

    def _closing_attribute(self, i: int) -> int:
        depth = 0
        for k in range(i, len(self.tokens)):
            text = self[k]
            depth += {"[[": 2, "[": 1, "]": -1}.get(text, 0)
            if depth == 0:
                return k
        raise SyntaxProblem("'[[' is never closed", self.tokens[i])

    def statement_start(self, i: int) -> int:
        """Position of the first code token of the statement or declaration that holds `i`."""
        depth, k = 0, i - 1
        while k >= 0:
            token = self.tokens[k]
            if token.kind == "mark":
                if token.text in (")", "]"):
                    depth += 1
                elif token.text in ("(", "[", "[["):
                    depth -= len(token.text)
                    if depth < 0:
                        break
                elif depth == 0 and token.text in (";", "{", "}"):
                    break
            k -= 1
        return self.after(k)

    def statement_end(self, i: int) -> int:
        """Position of the `;` that ends the statement holding `i`."""
        depth = 0
        for k in range(i, len(self.tokens)):
            text = self[k]
            if text in ("(", "{", "["):
                depth += 1
            elif text in (")", "}", "]"):
                depth -= 1
            elif text == "[[":
                depth += 2
            elif text == ";" and depth <= 0:
                return k
        raise SyntaxProblem("a statement is never ended", self.tokens[i])

    def code(self, begin: int, end: int) -> list[int]:
        """Positions of the code tokens in [begin, end)."""
        return [k for k in range(begin, end) if self.tokens[k].is_code]

    def text(self, begin: int, end: int) -> str:
        """Source text of [begin, end) without preprocessor lines and comments."""
        tokens = self.tokens[begin:end]
        return "".join(t.text for t in tokens if t.kind not in ("hash", "comment"))


def split_top_level(texts: Iterable[tuple[int, str]], separator: str = ",") -> list[list[int]]:
    """Groups positions between separators that stand outside every bracket."""
    parts: list[list[int]] = [[]]
    depth = angle = 0
    for position, text in texts:
        if text in ("(", "[", "{"):
            depth += 1
        elif text == "[[":
            depth += 2
        elif text in (")", "]", "}"):
            depth -= 1
        elif text == "<" and depth == 0:
            angle += 1
        elif text == ">" and depth == 0 and angle:
            angle -= 1
        if text == separator and depth == 0 and angle == 0:
            parts.append([])
        else:
            parts[-1].append(position)
    return parts


def air_name(s: Stream, i: int) -> str:
    """The instruction that the assembler's label at `i` gives to a function; empty if it is none
    that the machine has."""
    opening = s.after(i)
    match = (
        _AIR.match(s.text(opening + 1, s.closing(opening)).strip()) if s[opening] == "(" else None
    )
    return match[1] if match else ""
