# SPDX-License-Identifier: MIT
"""Reads fragment functions, and writes the kernel that runs one for each pixel of a picture."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from .kernels import Parameter, parameters_of
from .tokens import ADDRESS_SPACES, Stream, split_top_level

# What a full-screen pass gives for other attributes; `at` is the pixel.
_CONSTANT = {
    "position": "float4(float2(at) + 0.5f, 0.0f, 1.0f)",
    "front_facing": "true",
    "sample_id": "0",
    "sample_mask": "~0u",
    "primitive_id": "0",
    "render_target_array_index": "0",
    "viewport_array_index": "0",
    "amplification_id": "0",
}
_ATTRIBUTE = re.compile(r"\w+(?=\s*(?:$|[,(\]]))")
_COLOR = re.compile(r"\bcolor\s*\(\s*(\d+)\s*\)")
_VECTOR = re.compile(r"(?:metal::)?(float|half|int|uint|short|ushort|char|uchar|bool)([234]?)$")
_QUALIFIERS = ADDRESS_SPACES | {"const"}


class NoFragment(ValueError):
    """The function is not there, or is beyond what a full-screen pass can do."""


@dataclass(slots=True)
class Field:
    """A member of a struct, or a parameter."""

    type: str
    name: str
    attribute: str


@dataclass(slots=True)
class Fragment:
    """A fragment function: the kernel that runs it, and where its inputs and targets go."""

    kernel: str
    text: str
    # Interpolated members in the order of their corners, and how many channels each has.
    inputs: dict[str, int]
    corners: int  # buffer
    targets: dict[int, int]  # texture, by color
    has_derivatives: bool


def find_fragment(s: Stream, name: str, inputs: Collection[str]) -> Fragment:
    """The fragment function called `name`, with values at the corners for `inputs`."""
    found: list[str] = []
    for i, token in enumerate(s.tokens):
        if token.kind != "word" or token.text != "fragment":
            continue
        opening = i
        while opening < len(s) and s[opening] not in ("(", ";"):
            opening = s.after(s.closing(opening) if s[opening] == "[[" else opening)
        found.append(s[s.before(opening)])
        if found[-1] == name:
            words = [s[k] for k in s.code(i + 1, s.before(opening)) if s[k] not in ("]", "]]")]
            return _Writer(s, name, inputs).write("".join(words), opening)
    raise NoFragment(f"no fragment function '{name}'; there are {sorted(found)}")


class _Writer:
    def __init__(self, s: Stream, name: str, given: Collection[str]) -> None:
        self.s, self.name, self.given = s, name, given
        self.inputs: dict[str, int] = {}
        self.lines: list[str] = []

    def write(self, result: str, opening: int) -> Fragment:
        s = self.s
        parts = split_top_level((k, s[k]) for k in s.code(opening + 1, s.closing(opening)))
        fields = [_field(s, part) for part in parts if part]
        is_own = [self._is_own(f) for f in fields]
        resources = parameters_of(
            s, [p for p, own in zip((p for p in parts if p), is_own, strict=True) if not own]
        )
        buffers = [int(p.index) for p in resources if p.kind == "buffer"]
        textures = [p.number for p in resources if p.kind == "texture"]
        corners, first = max(buffers, default=-1) + 1, max(textures, default=-1) + 1
        colors = self._colors(result)
        targets = {color: first + n for n, color in enumerate(colors)}
        arguments = [
            self._argument(f, colors) if own else f.name
            for f, own in zip(fields, is_own, strict=True)
        ]
        self._call(result, arguments, colors)
        if unknown := set(self.given) - set(self.inputs):
            raise NoFragment(f"{self.name} has no inputs {sorted(unknown)}")
        declared = [f"{p.declared} [[{p.kind}({_number(p)})]]" for p in resources]
        declared += [
            f"texture2d<{kind}, access::read_write> msl_target{color} [[texture({targets[color]})]]"
            for color, (_, kind) in colors.items()
        ]
        declared += [
            f"constant float4* msl_corners [[buffer({corners})]]",
            f"constant uint2& msl_size [[buffer({corners + 1})]]",
            "uint2 at [[thread_position_in_grid]]",
        ]
        kernel = f"msl_render_{self.name}"
        lines = ["float2 msl_at = (float2(at) + 0.5f) / float2(msl_size);", *self.lines]
        text = f"kernel void {kernel}({', '.join(declared)}) {{\n  " + "\n  ".join(lines) + "\n}\n"
        words = {t.text for t in s.tokens if t.kind == "word"}
        is_wide = bool(words & {"dfdx", "dfdy", "fwidth"})
        return Fragment(kernel, text, self.inputs, corners, targets, is_wide)

    def _is_own(self, f: Field) -> bool:
        """Whether the pass makes this argument; the others are the caller's."""
        words = set(_ATTRIBUTE.findall(f.attribute))
        return bool(words & {"stage_in", "color", *_CONSTANT})

    def _argument(self, f: Field, colors: Collection[int]) -> str:
        if "stage_in" in f.attribute:
            self.lines.append(f"{f.type} msl_in;")
            for member in _members(self.s, f.type):
                self.lines.append(f"msl_in.{member.name} = {self._value(member)};")
            return "msl_in"
        if color := _COLOR.search(f.attribute):
            number = int(color[1])
            if number not in colors:
                raise NoFragment(f"{self.name} reads color({number}), but does not write it")
            return f"{f.type}(msl_target{number}.read(min(at, msl_size - 1)){_swizzle(f.type)})"
        return self._value(f)

    def _value(self, f: Field) -> str:
        for word in _ATTRIBUTE.findall(f.attribute):
            if word in _CONSTANT:
                return _CONSTANT[word]
        match = _VECTOR.match(f.type)
        if not match:
            raise NoFragment(f"{self.name}: {f.name} is a {f.type}, which is not interpolated")
        if f.name not in self.given:
            raise NoFragment(f"{self.name} reads '{f.name}': give its values at the corners")
        corner = f"msl_corners + {4 * len(self.inputs)}"
        self.inputs[f.name] = int(match[2] or 1)
        is_flat = match[1] not in ("float", "half") or "flat" in f.attribute
        value = f"*({corner})" if is_flat else f"msl_between({corner}, msl_at)"
        return f"{f.type}(({value}){_swizzle(f.type)})"

    def _colors(self, result: str) -> dict[int, tuple[str, str]]:
        """By color: what to take of the result, and the type of the target's channels."""
        if result == "void":
            return {}
        if _VECTOR.match(result):
            return {0: ("", _channel(result))}
        return {
            int(color[1]): (f".{f.name}", _channel(f.type))
            for f in _members(self.s, result)
            if (color := _COLOR.search(f.attribute))
        }

    def _call(self, result: str, arguments: list[str], colors: dict[int, tuple[str, str]]) -> None:
        call = f"{self.name}({', '.join(arguments)});"
        self.lines.append(call if result == "void" else f"const {result} msl_result = {call}")
        is_kept = "all(at < msl_size)"
        if any(t.text == "discard_fragment" for t in self.s.tokens):
            is_kept += " && !msl_is_discarded()"
        self.lines += [
            f"if ({is_kept}) msl_target{color}.write(msl_channels<{kind}>(msl_result{member}), at);"
            for color, (member, kind) in colors.items()
        ]


def _number(p: Parameter) -> str:
    return p.index if p.number < 0 else str(p.number)


def _swizzle(kind: str) -> str:
    match = _VECTOR.match(kind)
    return f".{'xyzw'[: int(match[2] or 1)]}" if match else ""


def _channel(kind: str) -> str:
    match = _VECTOR.match(kind)
    if not match:
        raise NoFragment(f"a {kind} is no color")
    is_real = match[1] in ("float", "half", "bool")
    return "float" if is_real else "uint" if match[1].startswith("u") else "int"


def _field(s: Stream, part: list[int]) -> Field:
    attribute, words, skip_to = "", [], -1
    for k in part:
        if s[k] == "[[":
            skip_to = s.closing(k)
            attribute += s.text(k + 1, skip_to - 1)
        if k > skip_to:
            words.append(s[k])
    kind = "".join(w for w in words[:-1] if w not in _QUALIFIERS)
    return Field(kind, words[-1] if words else "", attribute)


def _members(s: Stream, name: str) -> list[Field]:
    """The members of a struct of the source."""
    for i, token in enumerate(s.tokens):
        if token.kind != "word" or token.text != "struct":
            continue
        opening = s.after(i)
        names = [s[opening]]
        opening = s.after(opening) if names[0] != "{" else opening
        if s[opening] != "{":
            continue
        closing = s.closing(opening)
        if name in (*names, s[s.after(closing)]):
            parts = split_top_level(((k, s[k]) for k in s.code(opening + 1, closing)), ";")
            return [_field(s, part) for part in parts if part]
    raise NoFragment(f"no struct '{name}'")
