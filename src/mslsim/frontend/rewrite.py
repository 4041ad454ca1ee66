# SPDX-License-Identifier: MIT
"""Rewrites Metal tokens to C++ that the machine's headers understand, line for line."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .kernels import Found, Kernel, Parameter
from .storage import threadgroup_storage
from .tokens import ADDRESS_SPACES, Stream

Constants = Mapping[int, bool | int | float]

_NUMBER = re.compile(r"^((?:\d[\d']*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)([A-Za-z_]*)$")
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
        self.defined_constants: set[str] = set()
        self.slots = 0

    def run(self, kernels: list[Kernel], whole_groups: set[str]) -> str:
        """C++ text with thunks for `kernels`; those in `whole_groups` run a group in one loop."""
        s = self.s
        for begin, end in self.found.instantiations:
            self._replace(begin, end, "")
        self._merge_address_space_variants()
        for i in range(len(s)):
            self._token(i)
        thunks: dict[int, str] = {}
        for kernel in kernels:
            text = thunk(kernel, kernel.name in whole_groups)
            thunks[kernel.at] = thunks.get(kernel.at, "") + text
        out, i = [], 0
        while i < len(s):
            end, text = self.replaced.get(i, (i + 1, s[i]))
            out.append(text)
            out += [thunks[k] for k in range(i, end) if k in thunks]
            i = end
        return "".join(out) + "\n"

    def _replace(self, begin: int, end: int, text: str) -> None:
        """Puts `text` for [begin, end), keeping the line count and the preprocessor's lines."""
        kept = [t.text for t in self.s.tokens[begin:end] if t.kind == "hash"]
        newlines = sum(t.text.count("\n") for t in self.s.tokens[begin:end])
        tail = "\n" + "\n".join(kept) + "\n" if kept else "\n" * newlines
        self.replaced[begin] = (end, text + tail)

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
        constant = re.search(r"function_constant\s*\(\s*(\w+)\s*\)", self.s.text(i, end))
        text = ""
        if constant and constant[1].isdigit() and self.s[self.s.after(end)] == ";":
            index = int(constant[1])
            value = self.constants.get(index, 0)
            if index in self.constants:
                self.defined_constants.add(self.s[self.s.before(i)])
            text = f" = ({int(value) if isinstance(value, bool) else value!r})"
        self._replace(i, end + 1, text)

    def _word(self, i: int, word: str) -> None:
        s = self.s
        if word == "kernel":
            self.replaced[i] = (i + 1, "MSL_KERNEL")
        elif word in ("device", "thread", "ray_data", "object_data"):
            # `device::x` and `.thread` are names, `device ::metal::x` is qualified.
            if s[i + 1] != "::" and s[s.before(i)] not in (".", "->", "::"):
                self.replaced[i] = (i + 1, "")
        elif word == "threadgroup":
            if not self._threadgroup_storage(i):
                self.replaced[i] = (i + 1, "")
        elif word == "constant":
            qualifies_method = s[s.before(i)] in (")", "const") and s[s.after(i)] in "{:;="
            self.replaced[i] = (i + 1, "" if qualifies_method else "const")
        elif word == "is_function_constant_defined":
            opening = s.after(i)
            end = s.closing(opening)
            name = s.text(opening + 1, end).strip()
            value = "true" if name in self.defined_constants else "false"
            self._replace(i, end + 1, value)

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
            i += 1


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
    return f"msl::Buffer<{kind}>::get(a->{parameter.kind}[{parameter.index}])"


def threadgroup_names(cpp: str) -> dict[str, str]:
    """The names of the threadgroup variables in rewritten text, by slot."""
    return dict(re.findall(r"msl_slot_(\d+)_t& (\w+) =", cpp))
