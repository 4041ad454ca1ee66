# SPDX-License-Identifier: MIT
"""Rewrites Metal tokens to C++ that the machine's headers understand, line for line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..text.kernels import Found, Kernel, Parameter
from ..text.storage import threadgroup_storage
from ..text.tokens import ADDRESS_SPACES, ASSEMBLY, Stream, air_name, split_top_level
from ..text.unsimulated import UNSIMULATED, is_image
from .constants import constant_index

Constants = Mapping[int, bool | int | float]

_NUMBER = re.compile(r"^((?:\d[\d']*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)([A-Za-z_]*)$")
_VECTOR = re.compile(r"(?:bool|u?char|u?short|u?int|u?long|half|bfloat|float)[34]$")
_LENGTHS = frozenset({"uint", "ushort", "short", "size_t", "uint32_t", "unsigned", "uchar"})
_COHERENT = frozenset({"system", "device", "threadgroup"})
_ASSIGNING = frozenset({"+=", "-=", "*=", "/=", "%=", "&=", "|=", "^="})
_BINARY = frozenset("+-*/%&|^<>") | {"==", "!=", "<=", ">="}
_SWIZZLE = re.compile(r"(?:[xyzw]{2,4}|[rgba]{2,4})$")
_LETTERS = frozenset("xyzwrgba")
_PRAGMA_METAL = re.compile(r"#\s*pragma\s+METAL\s+fp\s+(contract\s*\(\s*\w+\s*\))")


def literal(text: str) -> str:
    """A number as Metal types it: unsuffixed reals are float, `h` is half, `bf` is bfloat."""
    match = _NUMBER.match(text)
    if not match or text[:2].lower() in ("0x", "0b"):
        return text
    digits, suffix = match.groups()
    real = bool(re.search(r"[.eE]", digits))
    if suffix in ("h", "H", "bf", "BF"):
        name = "half" if suffix in ("h", "H") else "bfloat"
        return f"{name}({digits if real else digits + '.0'}f)"
    return digits + "f" if real and not suffix else text


class Rewriter:
    """Turns one stream into C++. `constants` are the values of function constants by index."""

    def __init__(self, stream: Stream, found: Found, constants: Constants) -> None:
        self.s = stream
        self.found = found
        self.constants = constants
        self.replaced: dict[int, tuple[int, str]] = {}
        self.inserted: dict[int, str] = {}
        self.defined_constants: set[str] = set()
        self.instructions: set[str] = set()
        self.slots = 0

    def run(
        self,
        kernels: list[Kernel],
        whole_groups: set[str],
        left_out: Sequence[tuple[int, int]] = (),
    ) -> str:
        """C++ text with thunks for `kernels`; those in `whole_groups` run a group in one loop. Of
        the rest of the source, `left_out` are ranges to leave out too."""
        s = self.s
        for begin, end in (*self.found.left_out, *left_out):
            self._replace(begin, end, "")
        self._merge_address_space_variants()
        self._assigned_parts()
        self._read_swizzles()
        for i in range(len(s)):
            self._token(i)
        thunks: dict[int, str] = {}
        for kernel in kernels:
            text = thunk(kernel, kernel.name in whole_groups)
            thunks[kernel.at] = thunks.get(kernel.at, "") + text
        out, i = [], 0
        while i < len(s):
            end, text = self.replaced.get(i, (i + 1, s[i]))
            out.append(self.inserted.get(i, "") + text)
            out += [thunks[k] for k in range(i, end) if k in thunks]
            i = end
        words = {t.text for t in s.tokens if t.kind == "word"}
        names = {"msl_image": any(map(is_image, words)), "msl_unsimulated": words & UNSIMULATED}
        opened = [f"using namespace {name};" for name, has_words in names.items() if has_words]
        head = f"namespace metal {{ {' '.join(opened)} }}\n" if opened else ""
        return head + "".join(out) + "\n"

    def _replace(self, begin: int, end: int, text: str) -> None:
        """Puts `text` for [begin, end), keeping the line count and the preprocessor's lines."""
        kept = [t.text for t in self.s.tokens[begin:end] if t.kind == "hash"]
        newlines = sum(t.text.count("\n") for t in self.s.tokens[begin:end])
        tail = "\n" + "\n".join(kept) + "\n" if kept else "\n" * newlines
        width = 0 if tail else sum(len(t.text) for t in self.s.tokens[begin:end])
        # what follows stays in its column
        self.replaced[begin] = (end, text.ljust(width) + tail)

    def _token(self, i: int) -> None:
        token = self.s.tokens[i]
        if i in self.replaced:
            return
        if token.kind == "number":
            self.replaced[i] = (i + 1, literal(token.text))
        elif token.kind == "hash":
            pragma = _PRAGMA_METAL.match(token.text)
            if pragma:
                self.replaced[i] = (i + 1, f"#pragma clang fp {pragma[1]}")
        elif token.text == "[[":
            self._attribute(i)
        elif token.kind == "word":
            self._word(i, token.text)

    def _attribute(self, i: int) -> None:
        end = self.s.closing(i)
        index, text = constant_index(self.s, i, end), ""
        if index is not None and self.s[self.s.after(end)] == ";":
            value = self.constants.get(index, 0)
            if index in self.constants:
                self.defined_constants.add(self.s[self.s.before(i)])
            text = f" = ({int(value) if isinstance(value, bool) else value!r})"
        self._replace(i, end + 1, text)

    def _word(self, i: int, word: str) -> None:
        s = self.s
        if word == "kernel":
            self.replaced[i] = (i + 1, "MSLKRN")
        elif word in ADDRESS_SPACES - {"threadgroup", "constant"}:
            # `device::x` and `.thread` are names, `device ::metal::x` is qualified.
            if s[i + 1] != "::" and s[s.before(i)] not in (".", "->", "::"):
                self._replace(i, i + 1, "")
        elif word == "threadgroup":
            if not self._threadgroup_storage(i):
                self._replace(i, i + 1, "")
        elif word == "constant":
            qualifies_method = s[s.before(i)] in (")", "const") and s[s.after(i)] in "{:;="
            self._replace(i, i + 1, "" if qualifies_method else "const")
        elif word == "coherent" and s[s.before(i)] not in (".", "->", "::"):
            opening = s.after(i)
            if s[opening] == "(" and s[s.after(opening)] in _COHERENT:
                self._replace(i, s.closing(opening) + 1, "")
            elif s[opening] in ADDRESS_SPACES:
                self.replaced[i] = (i + 1, "")
        elif word in ASSEMBLY and (name := air_name(s, i)):
            self._instruction(i, name)
        elif word == "template" and s[s.after(i)] == "<":
            self._vector_lengths(s.after(i))
        elif _VECTOR.match(word):
            self._short_list(i, int(word[-1]))
        elif word == "is_function_constant_defined":
            opening = s.after(i)
            end = s.closing(opening)
            name = s.text(opening + 1, end).strip()
            value = "true" if name in self.defined_constants else "false"
            self._replace(i, end + 1, value)

    def _instruction(self, i: int, name: str) -> None:
        """`event* copy(...) __asm("air.x.p3i8");` names what the machine has as `msl_air_x`. Two
        that differ only in address space are one."""
        s = self.s
        start, end = s.statement_start(i), s.statement_end(i)
        own = s[s.before(s.opening(s.before(i)))]
        text = "" if own in self.instructions else f"constexpr metal::msl_air_{name} {own}{{}};"
        self.instructions.add(own)
        # what stands before the label has been rewritten by now
        for k in range(start, end + 1):
            self.replaced.pop(k, None)
        self._replace(start, end + 1, text)

    def _vector_lengths(self, opening: int) -> None:
        """`template <typename T, uint N> ... vec<T, N>`: the length of a vector may be deduced as
        any integer; in C++ only as the one that it is declared with."""
        s = self.s
        closing = s.closing(opening)
        for part in split_top_level((k, s[k]) for k in s.code(opening + 1, closing)):
            if len(part) < 2 or s[part[0]] not in _LENGTHS:
                continue
            k = s.after(closing)
            while k < len(s) and s[k] not in ("{", ";"):
                following = s.after(k)
                is_vector = s[k] == "vec" and s[following] == "<"
                if is_vector and s[s.before(s.closing(following))] == s[part[1]]:
                    self.replaced[part[0]] = (part[0] + 1, "int")
                    break
                k = following

    def _short_list(self, i: int, length: int) -> None:
        """`uint4 v = {1, 2, 3};`: what the list leaves out is zero."""
        s = self.s
        name = s.after(i)
        opening = s.after(name)
        if s[opening] == "=":
            opening = s.after(opening)
        if s[opening] != "{" or not s[name].isidentifier():
            return
        inside = s.code(opening + 1, s.closing(opening))
        if inside and 1 < len(split_top_level((k, s[k]) for k in inside)) < length:
            self.inserted[inside[0]] = "metal::msl_rest{}, "

    def _operators(self) -> set[str]:
        """Those that the source defines for types of its own."""
        s = self.s
        return {s[s.after(i)] for i, t in enumerate(s.tokens) if t.text == "operator"}

    def _read_swizzles(self) -> None:
        """`v.xy * w.xy` becomes a call where the source has operators of its own: beside them the
        compiler finds none for two properties in a template."""
        s = self.s
        if not self._operators() & _BINARY:
            return
        swizzles = [i for i, t in enumerate(s.tokens) if _SWIZZLE.match(t.text)]
        members = {s[i] for i in swizzles if s[s.before(i)] not in (".", "->")}
        for i in swizzles:
            following = s[s.after(i)]
            if s[i] not in members and following not in _ASSIGNING | {"=", "++", "--"}:
                self.replaced[i] = (i + 1, f"get_{s[i]}()")

    def _assigned_parts(self) -> None:
        """`v.x += y` becomes an assignment to the element itself where the source has such
        operators of its own: the compiler then takes none for a property in a template."""
        s, own = self.s, self._operators() & _ASSIGNING
        for i, token in enumerate(s.tokens):
            if token.text not in own:
                continue
            letter = s.before(i)
            dot = s.before(letter)
            if s[letter] not in _LETTERS or s[dot] not in (".", "->"):
                continue
            start = _start_of_operand(s, dot)
            if start is not None:
                before, after = ("", "") if s[dot] == "." else ("*(", ")")
                self.inserted[start] = f"metal::msl_part_{s[letter]}({before}"
                self._replace(dot, letter + 1, f"{after}, 0)")

    def _threadgroup_storage(self, i: int) -> bool:
        """`threadgroup T a[N], b;` declares memory of the group, unless a pointer follows."""
        found = threadgroup_storage(self.s, i)
        if found is None:
            return False
        text = "".join(self._slot(found.type, part) for part in found.declarators)
        self._replace(i, found.end + 1, text)
        return True

    def _slot(self, base: str, declarator: list[int]) -> str:
        self.slots += 1
        name = self.s[declarator[0]]
        suffix = ""
        for k in declarator[1:]:
            if self.s[k] in ("=", "{"):
                break
            suffix += literal(self.s[k])
        kind = f"msl_slot_{self.slots}_t"
        return (
            f"typedef {base} {kind}{suffix}; "
            f"{kind}& {name} = msl::threadgroup_memory<{kind}>({self.slots}); "
        )

    def _merge_address_space_variants(self) -> None:
        """Keeps the first of the members, overloads and specialisations that differ only in
        address space: here they are one and the same."""
        s = self.s
        scopes: list[tuple[bool, int]] = []
        seen: set[tuple[int, str]] = set()
        i = 0
        while i < len(s):
            if i in self.replaced:
                i = self.replaced[i][0]
                continue
            if s.tokens[i].kind == "mark" and s[i] == "{":
                start = s.statement_start(i)
                header = [s[k] for k in s.code(start, i)]
                is_type = _opens_type(header)
                if (not scopes or scopes[-1][0]) and ADDRESS_SPACES.intersection(header):
                    key = (scopes[-1][1] if scopes else -1, _without_spaces(header))
                    if key in seen:
                        end = s.closing(i)
                        if is_type and s[s.after(end)] == ";":
                            end = s.after(end)
                        self._replace(start, end + 1, "")
                        i = end + 1
                        continue
                    seen.add(key)
                scopes.append((is_type, i))
            elif s.tokens[i].kind == "mark" and s[i] == "}" and scopes:
                scopes.pop()
            elif s[i] == ";" and scopes and scopes[-1][0] and self._repeats(i, scopes[-1][1], seen):
                self._replace(s.statement_start(i), i + 1, "")
            i += 1

    def _repeats(self, end: int, scope: int, seen: set[tuple[int, str]]) -> bool:
        """Whether a method without a body, such as `S() device = default`, was there before."""
        s = self.s
        header = [s[k] for k in s.code(s.statement_start(end), end)]
        after = header[header.index(")") :] if ")" in header else []
        if not ADDRESS_SPACES.intersection(after):
            return False
        key = (scope, _without_spaces(header))
        known = key in seen
        seen.add(key)
        return known


def _start_of_operand(s: Stream, dot: int) -> int | None:
    """Where the operand before a `.` begins: names, calls and subscripts."""
    k = s.before(dot)
    while k >= 0:
        if s[k] in (")", "]"):
            k = s.opening(k)
            if s.tokens[s.before(k)].kind != "word" and s[s.before(k)] not in (")", "]"):
                return k
            k = s.before(k)
            continue
        if s.tokens[k].kind != "word":
            return None
        if s[s.before(k)] not in (".", "->", "::"):
            return k
        k = s.before(s.before(k))
    return None


def _opens_type(header: list[str]) -> bool:
    angle = 0
    for word in header:
        if word == "<":
            angle += 1
        elif word == ">":
            angle -= 1
        elif word == "(":
            return False
        elif angle <= 0 and word in ("struct", "class", "namespace", "union", "enum", "extern"):
            return True
    return False


def _without_spaces(header: list[str]) -> str:
    """The header with address spaces taken out, up to a constructor's initialisers."""
    words, depth = [], 0
    for word in header:
        depth += {"(": 1, ")": -1}.get(word, 0)
        if word == ":" and depth == 0:
            break
        if word == "constant" and depth > 0:
            words.append("const")
        elif word not in ADDRESS_SPACES:
            words.append(word)
    # `const constant T&` and `constant T&` are the same reference.
    return " ".join(words).replace("const const", "const")


def symbol(name: str) -> str:
    """The linker's name for a kernel."""
    return re.sub(r"\W", lambda m: f"_{ord(m[0]):x}_", name)


def thunk(kernel: Kernel, whole_group: bool) -> str:
    """C functions that call the kernel from a launch, and the table of its buffers."""
    types = f"msl::Signature<decltype(&{kernel.expression})>"
    arguments = ", ".join(
        _argument(f"S::parameter<{i}>", p) for i, p in enumerate(kernel.parameters)
    )
    call = f"{kernel.expression}({arguments});"
    name = symbol(kernel.name)
    if whole_group:
        entry = (
            f"void msl_group_{name}(const msl::Arguments* a, const msl::Group* g) {{"
            f" using S = {types};"
            " const msl::Arguments args = *a; const msl::Group group = *g; a = &args; g = &group;"
            " for (unsigned z = 0, i = 0; z < g->size[2]; ++z)"
            " for (unsigned y = 0; y < g->size[1]; ++y, i += g->size[0])"
            " for (unsigned x = 0; x < g->size[0]; ++x) {"
            f" const msl::Thread t(i + x, x, y, z); {call} }} }}"
        )
    else:
        entry = (
            f"void msl_thread_{name}(const msl::Arguments* a, const msl::Group* g, unsigned i) {{"
            f" using S = {types}; const msl::Thread t(g, i); {call} }}"
        )
    rows = [
        f"{{{int(p.kind == 'threadgroup')}, int({p.index}), B::size, B::read_only,"
        f" B::is_reference, B::number}}".replace("B::", f"msl::Buffer<{types}::parameter<{i}>>::")
        for i, p in enumerate(kernel.parameters)
        if p.kind != "position"
    ]
    table = f"extern const int msl_table_{name}[][6] = {{{', '.join([*rows, '{-1}'])}}};"
    return f' extern "C" {{ {entry} {table} }} '


def _argument(kind: str, parameter: Parameter) -> str:
    if parameter.kind == "position":
        return f"msl::Position<{kind}>::get({', '.join(parameter.position)})"
    table = "threadgroup" if parameter.kind == "threadgroup" else "buffer"
    return f"msl::Buffer<{kind}>::get(a->{table}[{parameter.index}])"


def threadgroup_arrays(cpp: str) -> list[tuple[int, str, str]]:
    """Slot, name and type of the threadgroup variables in rewritten text."""
    found = re.findall(r"typedef ([^;]*) msl_slot_(\d+)_t[^;]*; msl_slot_\d+_t& (\w+) =", cpp)
    return [(int(slot), name, kind) for kind, slot, name in found]
