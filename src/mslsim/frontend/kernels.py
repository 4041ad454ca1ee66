# SPDX-License-Identifier: MIT
"""Finds the kernels of a token stream: definitions, explicit instantiations, parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from .tokens import Stream, SyntaxProblem, split_top_level

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
_INDEX = re.compile(r"\b(buffer|threadgroup)\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)")


@dataclass(slots=True)
class Parameter:
    """One parameter of a kernel. `index` is C++ text: it may name a constant."""

    name: str
    kind: str  # "buffer", "threadgroup" or "position"
    index: str
    attribute: str = ""
    position: tuple[str, ...] = ()
    declared: str = ""
    line: int = 0
    file: str = ""


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
    # Explicit instantiations, as token ranges to leave out.
    instantiations: list[tuple[int, int]] = field(default_factory=list)


def find_kernels(s: Stream) -> Found:
    """All kernels that have a name on the host side, in source order."""
    found = Found()
    scopes: dict[str, str] = {}
    seen: set[int] = set()
    open_scopes: list[str] = []
    for i, token in enumerate(s.tokens):
        if token.kind == "mark" and token.text in ("{", "}"):
            _follow(s, i, open_scopes)
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
            found.instantiations.append((start, end + 1))
        else:
            name = _definition(s, start, found)
            scopes[name] = "::" + "".join(f"{scope}::" for scope in open_scopes if scope)
    for kernel in found.kernels:
        if kernel.function not in found.definitions:
            raise SyntaxProblem(
                f"kernel '{kernel.function}' is instantiated but not defined", s.tokens[0]
            )
        kernel.parameters = found.definitions[kernel.function].parameters
        if "::" not in kernel.expression.split("<")[0]:
            # A kernel may bear the name of a library function.
            kernel.expression = scopes[kernel.function] + kernel.expression
    return found


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
    name = _host_name(s, start, end) or function
    token = s.tokens[start]
    expression = " ".join(expression.split())
    place = (token.line, token.file)
    return Kernel(name, expression, function, [], *place, end, tuple(arguments))


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
    parameters = _parameters(s, k + 1, end)
    body = s.after(end)
    while s[body] == "[[":
        body = s.after(s.closing(body))
    has_body = s[body] == "{"
    end = s.closing(body) if has_body else body
    if has_body or name not in found.definitions:
        found.definitions[name] = Definition(parameters, template or [], start, name_at, body, end)
    if has_body and template is None:
        token = s.tokens[name_at]
        host = _host_name(s, start, k) or name
        found.kernels.append(Kernel(host, name, name, [], token.line, token.file, end))
    return name


def _template_parameter(text: str) -> TemplateParameter:
    declared, _, default = text.partition("=")
    *kind, name = re.findall(r"\w+", declared)
    return TemplateParameter(" ".join(kind), name, default.strip())


def _parameters(s: Stream, begin: int, end: int) -> list[Parameter]:
    parameters = []
    for part in split_top_level((k, s[k]) for k in s.code(begin, end)):
        if not part:
            continue
        parameters.append(_parameter(s, part))
    taken = {int(p.index) for p in parameters if p.kind == "buffer" and p.index.isdigit()}
    free = 0
    for parameter in parameters:
        if parameter.kind == "buffer" and not parameter.index:
            while free in taken:
                free += 1
            parameter.index = str(free)
            taken.add(free)
    return parameters


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
        kind = "threadgroup" if index[1] == "threadgroup" else "buffer"
        return Parameter(name, kind, index[2].strip(), attribute, (), *place)
    for word in re.findall(r"\w+", attributes):
        if word in _POSITIONS:
            return Parameter(name, "position", "", attribute, _POSITIONS[word], *place)
    return Parameter(name, "buffer", "", attribute, (), *place)
