# SPDX-License-Identifier: MIT
"""Finds the kernels of a token stream: definitions, explicit instantiations, parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from .tokens import ADDRESS_SPACES, Stream, SyntaxProblem, Token, split_top_level
from .unsimulated import NOT_SIMULATED, TEXTURE, unsimulated_feature

# Attribute -> C++ expression of its x, y, z; `g` is the Group, `t` the Thread.
_POSITIONS = {
    "thread_position_in_grid": tuple(
        f"g->position[{i}] * g->dispatch_size[{i}] + t.{axis}" for i, axis in enumerate("xyz")
    ),
    "thread_position_in_threadgroup": ("t.x", "t.y", "t.z"),
    "threadgroup_position_in_grid": tuple(f"g->position[{i}]" for i in range(3)),
    "threads_per_threadgroup": tuple(f"g->size[{i}]" for i in range(3)),
    "dispatch_threads_per_threadgroup": tuple(f"g->dispatch_size[{i}]" for i in range(3)),
    "threads_per_grid": tuple(f"g->grid_threads[{i}]" for i in range(3)),
    "threadgroups_per_grid": tuple(f"g->grid_groups[{i}]" for i in range(3)),
    "thread_index_in_threadgroup": ("t.index", "0", "0"),
    "thread_index_in_simdgroup": ("t.index % 32", "0", "0"),
    "simdgroup_index_in_threadgroup": ("t.index / 32", "0", "0"),
    "simdgroups_per_threadgroup": ("g->simdgroups", "1", "1"),
    "dispatch_simdgroups_per_threadgroup": ("g->simdgroups", "1", "1"),
    "threads_per_simdgroup": ("32", "1", "1"),
    "thread_execution_width": ("32", "1", "1"),
    "quadgroup_index_in_threadgroup": ("t.index / 4", "0", "0"),
    "thread_index_in_quadgroup": ("t.index % 4", "0", "0"),
    "quadgroups_per_threadgroup": ("(g->threads + 3) / 4", "1", "1"),
    "dispatch_quadgroups_per_threadgroup": ("(g->threads + 3) / 4", "1", "1"),
    "thread_position_in_grid_offset": ("0", "0", "0"),
    "grid_origin": ("0", "0", "0"),
    "grid_size": tuple(f"g->grid_threads[{i}]" for i in range(3)),
}
# Textures and samplers take the places of buffers, from the last one down.
_LAST_BUFFER = 30
_OTHER_STAGES = frozenset({"vertex", "fragment"})
# Those that only an attribute names.
_ATTRIBUTED_STAGES = frozenset({"mesh", "object", "intersection"})
_QUALIFIERS = ADDRESS_SPACES | {"const", "volatile", "restrict", "__restrict", "coherent"}
_SPACES = ADDRESS_SPACES - {"constant"}
_NUMBERS = frozenset({"unsigned", "signed", "int", "long", "short", "char"})
_INDEX = re.compile(r"\b(buffer|threadgroup|texture|sampler)\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)")


@dataclass(slots=True)
class Parameter:
    """One parameter of a kernel. `index` is C++ text: it may name a constant."""

    name: str
    kind: str  # "buffer", "threadgroup", "texture", "sampler" or "position"
    index: str
    attribute: str = ""
    position: tuple[str, ...] = ()
    declared: str = ""
    line: int = 0
    file: str = ""
    # Of a texture or sampler, the one that its attribute gives.
    number: int = -1


@dataclass(slots=True)
class Kernel:
    """A kernel as the host sees it: `expression` is the C++ function, e.g. `add<float>`."""

    name: str
    expression: str
    function: str
    parameters: list[Parameter] = field(default_factory=list)
    line: int = 0
    file: str = ""
    # Token after which the kernel can be called.
    at: int = 0
    arguments: tuple[str, ...] = ()
    # Types of the parameters as an instantiation lists them, for templates that deduce from them.
    types: tuple[str, ...] | None = None

    @property
    def refusal(self) -> str:
        """Why it cannot run here, by its parameters; empty if it can."""
        for p in self.parameters:
            if feature := unsimulated_feature(f"{p.declared} {p.attribute}"):
                return f"{NOT_SIMULATED} {feature}, which '{p.name}' is"
        return ""


class TemplateParameter(NamedTuple):
    """`typename T`, or `int N = 4`."""

    type: str
    name: str
    default: str


@dataclass(slots=True)
class Definition:
    """A kernel function, or the template of some: token positions, and what it declares.

    The name is at `name`, the body in [body, end].
    """

    parameters: list[Parameter]
    template: list[TemplateParameter]
    begin: int
    name: int
    body: int
    end: int


@dataclass(slots=True)
class Found:
    """What the search leaves for the rewriter."""

    kernels: list[Kernel] = field(default_factory=list)
    definitions: dict[str, Definition] = field(default_factory=dict)
    # All that have bodies, by name: a template may be overloaded.
    overloads: dict[str, list[Definition]] = field(default_factory=dict)
    # Explicit instantiations and functions of other stages, as token ranges to leave out.
    left_out: list[tuple[int, int]] = field(default_factory=list)


def find_kernels(s: Stream) -> Found:
    """All kernels that have a name on the host side, in source order."""
    found = Found()
    scopes: dict[str, str] = {}
    seen: set[int] = set()
    open_scopes: list[str] = []
    for i, token in enumerate(s.tokens):
        if token.kind == "mark" and token.text in ("{", "}"):
            _follow(s, i, open_scopes)
        if token.text in _OTHER_STAGES | _ATTRIBUTED_STAGES and (other := _other_stage(s, i)):
            found.left_out.append(other)
        bare = token.kind == "word" and token.text == "kernel" and s[s.before(i)] not in ("[[", ",")
        attribute = token.text == "[[" and s[s.after(i)] == "kernel"
        if not (bare or attribute):
            continue
        start = s.statement_start(i)
        if start in seen:
            continue
        seen.add(start)
        if s[start] == "template" and s[s.after(start)] != "<":
            end = s.statement_end(start)
            found.kernels.append(_instantiation(s, start, end))
            found.left_out.append((start, end + 1))
        else:
            name = _definition(s, start, found)
            scopes[name] = "::" + "".join(f"{scope}::" for scope in open_scopes if scope)
    for kernel in found.kernels:
        if kernel.function not in found.definitions:
            raise SyntaxProblem(
                f"kernel '{kernel.function}' is instantiated but not defined", s.tokens[0]
            )
        if "::" not in kernel.expression.split("<")[0]:
            # A kernel may bear the name of a library function.
            kernel.expression = scopes[kernel.function] + kernel.expression
        _resolve(kernel, found)
    return found


def _resolve(kernel: Kernel, found: Found) -> None:
    """Which of the functions of its name it is, by what its instantiation lists."""
    overloads = found.overloads.get(kernel.function, [])
    kernel.parameters = found.definitions[kernel.function].parameters
    if kernel.types is None or (kernel.arguments and len(overloads) < 2):
        return
    fitting = [d for d in overloads if len(d.parameters) == len(kernel.types)]
    if fitting:
        kernel.parameters = fitting[0].parameters
    types = ", ".join(kernel.types)
    kernel.expression = f"(*static_cast<void (*)({types})>(&{kernel.expression}))"


def _other_stage(s: Stream, i: int) -> tuple[int, int] | None:
    """The tokens of a function of another stage: no kernel can call it."""
    previous, following = s[s.before(i)], s[s.after(i)]
    attribute = previous == "[[" and following in ("]", ",", "(")
    starts = previous in ("", ";", "}", "{", ">", "]", "inline", "static")
    if not attribute and not (
        s[i] in _OTHER_STAGES and starts and s.tokens[s.after(i)].kind == "word"
    ):
        return None
    start, k = s.statement_start(s.before(i) if attribute else i), i
    while k < len(s) and s[k] not in ("{", ";"):
        k = s.after(s.closing(k)) if s[k] in ("(", "[[") and not attribute else s.after(k)
        attribute = False
    return start, (s.closing(k) if s[k] == "{" else k) + 1


def _follow(s: Stream, i: int, open_scopes: list[str]) -> None:
    """Keeps the stack of open braces; namespaces by name, all else as an empty string."""
    if s[i] == "}":
        if open_scopes:
            open_scopes.pop()
        return
    header = [s[k] for k in s.code(s.statement_start(i), i)]
    if "namespace" in header and "(" not in header:
        open_scopes.append("".join(header[header.index("namespace") + 1 :]))
    else:
        open_scopes.append("")


def _host_name(s: Stream, begin: int, end: int) -> str | None:
    for k in s.code(begin, end):
        if s[k] == "host_name":
            opening = s.after(k)
            inside = s.text(opening, s.closing(opening))
            return "".join(re.findall(r'"([^"]*)"', inside))
    return None


def _instantiation(s: Stream, start: int, end: int) -> Kernel:
    """`template [[host_name("n")]] kernel void f<A>(...)` or `... decltype(f<A>) f<A>`, or with a
    name for the type of the function: `... kernel f_t f<A>`."""
    plain: list[int] = []
    k = start
    while k < end:
        if s[k] == "[[":
            k = s.closing(k) + 1
            continue
        if s.tokens[k].is_code:
            plain.append(k)
        k += 1
    words = [s[p] for p in plain]
    first = 1
    if "decltype" in words:
        opening = plain[words.index("decltype") + 1]
        first = plain.index(s.closing(opening)) + 1
    elif "void" in words:
        first = words.index("void") + 1
    name_end = first
    while name_end < len(words) and (words[name_end] == "::" or words[name_end].isidentifier()):
        name_end += 1
    at = name_end - 1
    while at > first and words[at - 1] == "::":
        at -= 2 if at - 2 >= first and words[at - 2].isidentifier() else 1
    function = words[name_end - 1]
    expression, arguments = "".join(words[at:name_end]), []
    if name_end < len(words) and words[name_end] == "<":
        opening = plain[name_end]
        closing = s.closing(opening)
        expression += s.text(opening, closing + 1)
        arguments = _between_commas(s, opening, closing)
        name_end = plain.index(closing) + 1
    types = None
    if name_end < len(words) and words[name_end] == "(":
        opening = plain[name_end]
        inside = s.code(opening + 1, s.closing(opening))
        types = tuple(_type(s, part) for part in split_top_level((k, s[k]) for k in inside) if part)
    name = _host_name(s, start, end) or function
    token = s.tokens[start]
    expression = " ".join(expression.split())
    place = (token.line, token.file)
    return Kernel(name, expression, function, [], *place, end, tuple(arguments), types)


def _type(s: Stream, part: list[int]) -> str:
    """The type of a parameter whose name may be left out, in C++."""
    words, skip_to = [], -1
    for k in part:
        if s[k] == "[[":
            skip_to = s.closing(k)
        if k > skip_to:
            words.append(s[k])
    is_named = (
        len(words) > 1
        and words[-1].isidentifier()
        and words[-1] not in _NUMBERS
        and words[-2] not in _QUALIFIERS | {"::"}
    )
    kept = words[:-1] if is_named else words
    return " ".join("const" if w == "constant" else w for w in kept if w not in _SPACES)


def _between_commas(s: Stream, opening: int, closing: int) -> list[str]:
    """What stands in a pair of brackets, part by part."""
    parts = split_top_level((k, s[k]) for k in s.code(opening + 1, closing))
    return [" ".join(s.text(part[0], part[-1] + 1).split()) for part in parts if part]


def _definition(s: Stream, start: int, found: Found) -> str:
    """Adds the definition that starts there; returns its name."""
    k, template = start, None
    while s[k] != "(":
        if s[k] == "[[":
            k = s.closing(k)
        elif s[k] == "template":
            opening = s.after(k)
            k = s.closing(opening)
            template = [_template_parameter(text) for text in _between_commas(s, opening, k)]
        elif s[k] in ("__attribute__", "alignas"):
            k = s.closing(s.after(k))
        k = s.after(k)
        if k >= len(s):
            raise SyntaxProblem("a kernel has no parameter list", s.tokens[start])
    name_at = s.before(k)
    name, end = s[name_at], s.closing(k)
    parts = split_top_level((p, s[p]) for p in s.code(k + 1, end))
    parameters = parameters_of(s, [part for part in parts if part])
    body = s.after(end)
    while s[body] == "[[":
        body = s.after(s.closing(body))
    has_body = s[body] == "{"
    end = s.closing(body) if has_body else body
    if has_body or name not in found.definitions:
        definition = Definition(parameters, template or [], start, name_at, body, end)
        found.definitions[name] = definition
        if has_body:
            found.overloads.setdefault(name, []).append(definition)
    if has_body and template is None:
        token = s.tokens[name_at]
        host = _host_name(s, start, k) or name
        found.kernels.append(Kernel(host, name, name, [], token.line, token.file, end))
    return name


def _template_parameter(text: str) -> TemplateParameter:
    declared, _, default = text.partition("=")
    *kind, name = re.findall(r"\w+", declared)
    return TemplateParameter(" ".join(kind), name, default.strip())


def parameters_of(s: Stream, parts: list[list[int]]) -> list[Parameter]:
    """The parameters whose tokens are given, with buffers, textures and samplers numbered."""
    parameters = [_parameter(s, part) for part in parts]
    taken = {int(p.index) for p in parameters if p.kind == "buffer" and p.index.isdigit()}
    free = 0
    for parameter in parameters:
        if parameter.kind == "buffer" and not parameter.index:
            while free in taken:
                free += 1
            parameter.index = str(free)
            taken.add(free)
    _place_textures(parameters, taken, s.tokens[parts[0][0]] if parts else s.tokens[0])
    return parameters


def _place_textures(parameters: list[Parameter], taken: set[int], at: Token) -> None:
    """Numbers textures and samplers, and gives them places that no buffer has."""
    below = _LAST_BUFFER
    for kind in ("texture", "sampler"):
        own = [p for p in parameters if p.kind == kind]
        known = {int(p.index) for p in own if p.index.isdigit()}
        for p in own:
            p.number = int(p.index) if p.index.isdigit() else min({*range(128)} - known)
            known.add(p.number)
            p.index = str(below - p.number)
            if below - p.number in taken or below < p.number:
                raise SyntaxProblem("more textures, samplers and buffers than mslsim has", at)
        below -= max(known, default=-1) + 1


def _parameter(s: Stream, part: list[int]) -> Parameter:
    attributes, plain, skip_to = "", [], -1
    for k in part:
        if k <= skip_to:
            continue
        if s[k] == "[[":
            skip_to = s.closing(k)
            attributes += s.text(k, skip_to + 1)
        else:
            plain.append(k)
    words = [k for k in plain if s.tokens[k].kind == "word"]
    first = s.tokens[part[0]]
    name = s[words[-1]] if words else "?"
    declared = " ".join(s[k] for k in plain)
    place = (declared, first.line, first.file)
    attribute = attributes.replace("[[", "").replace("]]", "").strip()
    index = _INDEX.search(attributes)
    if index:
        return Parameter(name, index[1], index[2].strip(), attribute, (), *place)
    if any(TEXTURE.match(s[k]) for k in words):
        return Parameter(name, "texture", "", attribute, (), *place)
    if "sampler" in (s[k] for k in words):
        return Parameter(name, "sampler", "", attribute, (), *place)
    for word in re.findall(r"\w+", attributes):
        if word in _POSITIONS:
            return Parameter(name, "position", "", attribute, _POSITIONS[word], *place)
    return Parameter(name, "buffer", "", attribute, (), *place)
