# SPDX-License-Identifier: MIT
"""What the kernels of a Metal source declare."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from . import kernels
from .macros import expanded
from .scopes import Scopes, find_scopes, functions_reaching
from .storage import threadgroup_storage
from .tokens import ADDRESS_SPACES, Stream, SyntaxProblem

_COLLECTIVES = ("simd_", "quad_", "simdgroup_", "threadgroup_")
_QUALIFIERS = ADDRESS_SPACES | {"const", "volatile", "restrict", "__restrict"}
_SCALAR_BYTES = {
    **dict.fromkeys(("bool", "char", "uchar", "int8_t", "uint8_t"), 1),
    **dict.fromkeys(("short", "ushort", "half", "bfloat", "int16_t", "uint16_t"), 2),
    **dict.fromkeys(("int", "uint", "float", "int32_t", "uint32_t"), 4),
    **dict.fromkeys(("long", "ulong", "size_t", "int64_t", "uint64_t"), 8),
}
_VECTOR = re.compile(r"(packed_)?([a-z]+)([234])")
_GENERIC = re.compile(r"(vec|atomic) ?< ?(\w+) ?(?:, ?(\w+) ?)?>")
_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parameter:
    """One buffer of a kernel: `device const float* x` or `constant long& n`."""

    name: str
    type: str
    space: str
    index: int
    is_scalar: bool
    is_written: bool
    declaration: str


@dataclass(frozen=True, slots=True)
class Position:
    """A parameter that no argument fills, such as `uint i [[thread_position_in_grid]]`."""

    name: str
    attribute: str
    declaration: str


@dataclass(frozen=True, slots=True)
class Array:
    """Threadgroup memory of a kernel: `threadgroup float tile[32][33]`."""

    name: str
    type: str
    sizes: tuple[str, ...]


@dataclass(frozen=True)
class Signature:
    """A kernel function, or the template of some.

    `parameters` are in buffer order. `instances` are the template arguments of each kernel the host
    can ask for, by its name. `constants` are what array sizes may name. `ranges` are the places in
    the text that define and instantiate the kernel.
    """

    name: str
    template: tuple[kernels.TemplateParameter, ...]
    parameters: tuple[Parameter, ...]
    others: tuple[Position, ...]
    arrays: tuple[Array, ...]
    has_collectives: bool
    threads_limit: str | None
    body: str
    instances: Mapping[str, tuple[str, ...]]
    constants: Mapping[str, str]
    ranges: tuple[tuple[int, int], ...]

    @cached_property
    def threadgroup_bytes(self) -> int:
        """Bytes of threadgroup memory that the greediest of its kernels declares."""
        return max((self.threadgroup_bytes_of(name) for name in self.instances), default=0)

    def threadgroup_bytes_of(self, kernel: str) -> int:
        """The same of one kernel. Raises ValueError where the text does not tell."""
        return self.threadgroup_bytes_for(self.instances[kernel])

    def threadgroup_bytes_for(self, arguments: Sequence[str]) -> int:
        """The same for template arguments."""
        values = self._values(arguments)
        total = 0
        for array in self.arrays:
            size = _type_bytes(array.type, values)
            counts = [_evaluate(text, values) for text in array.sizes]
            if size is None or None in counts:
                sizes = "".join(f"[{text}]" for text in array.sizes)
                raise ValueError(
                    f"{self.name}: threadgroup array {array.name} must have a plain type and a "
                    f"constant size, got {array.type} {sizes}"
                )
            total += size * prod(count for count in counts if count is not None)
        return total

    def max_threads_of(self, kernel: str) -> int | None:
        """The kernel's [[max_total_threads_per_threadgroup(n)]], if it has one."""
        return self.max_threads_for(self.instances[kernel])

    def max_threads_for(self, arguments: Sequence[str]) -> int | None:
        """The same for template arguments."""
        if self.threads_limit is None:
            return None
        found = _evaluate(self.threads_limit, self._values(arguments))
        if found is None:
            raise ValueError(
                f"{self.name}: the limit of threads is {self.threads_limit}, no constant"
            )
        return found

    def _values(self, arguments: Sequence[str]) -> dict[str, str]:
        """What the names in its text stand for, with these template arguments."""
        defaults = {t.name: t.default for t in self.template}
        given = dict(zip(defaults, arguments, strict=False))
        return {**self.constants, **defaults, **given}


def read_signatures(text: str) -> dict[str, Signature]:
    """The kernel functions of `text` by name. Headers that matter must be in the text.

    Raises ValueError where the text cannot be read as Metal.
    """
    try:
        return _signatures(text, expanded(text))
    except SyntaxProblem as problem:
        raise ValueError(f"{problem.token.file}:{problem.token.line}: {problem}") from None


def _signatures(text: str, s: Stream) -> dict[str, Signature]:
    found = kernels.find_kernels(s)
    scopes = find_scopes(s)
    tokens = s.tokens
    collective = functions_reaching(
        s,
        scopes.functions,
        lambda k: tokens[k].text.startswith(_COLLECTIVES) and s[s.after(k)] == "(",
    )
    constants = _constants(s, scopes)
    return {
        name: _signature(text, s, name, found, constants, name in collective)
        for name, definition in found.definitions.items()
        if s[definition.body] == "{"
    }


def without_kernels(text: str, signatures: Mapping[str, Signature]) -> str:
    """What the kernels of `text` are built on: the text less their definitions and instances.
    Lines keep their numbers."""
    for begin, end in sorted({r for s in signatures.values() for r in s.ranges}, reverse=True):
        text = text[:begin] + "\n" * text.count("\n", begin, end) + text[end:]
    return text


def _signature(
    text: str,
    s: Stream,
    name: str,
    found: kernels.Found,
    constants: dict[str, str],
    has_collectives: bool,
) -> Signature:
    definition = found.definitions[name]
    own = [k for k in found.kernels if k.function == name]
    local = {**constants, **_declared_constants(s, s.code(definition.body, definition.end))}
    buffers = [_buffer(p, local) for p in definition.parameters if p.kind == "buffer"]
    others = [p for p in definition.parameters if p.kind != "buffer"]
    limit = re.search(
        r"max_total_threads_per_threadgroup\s*\(([^()]*)\)",
        s.text(definition.begin, definition.body),
    )
    body = (s.tokens[definition.body].end, s.tokens[definition.end].begin)
    ranges = [(s.tokens[definition.begin].begin, s.tokens[definition.end].end)]
    ranges += [
        (s.tokens[begin].begin, s.tokens[end - 1].end)
        for begin, end in found.left_out
        if any(k.at == end - 1 for k in own)
    ]
    return Signature(
        name,
        tuple(definition.template),
        tuple(sorted(buffers, key=lambda p: p.index)),
        tuple(Position(p.name, p.attribute, p.declared) for p in others),
        tuple(_arrays(s, definition)),
        has_collectives,
        limit[1].strip() if limit else None,
        text[slice(*body)],
        {k.name: k.arguments for k in own},
        local,
        tuple(dict.fromkeys(ranges)),
    )


def _buffer(parameter: kernels.Parameter, constants: dict[str, str]) -> Parameter:
    words = parameter.declared.split(" ")
    star = next((i for i, word in enumerate(words) if word in ("*", "&")), len(words) - 1)
    pointed = words[:star]
    space = next((word for word in pointed if word in ADDRESS_SPACES), "")
    index = _evaluate(parameter.index, constants)
    if index is None:
        raise ValueError(f"buffer {parameter.name}: index {parameter.index} is no constant")
    return Parameter(
        parameter.name,
        _tidy([word for word in pointed if word not in _QUALIFIERS]),
        space,
        index,
        is_scalar=words[star] == "&" and space == "constant",
        is_written=space == "device" and "const" not in pointed,
        declaration=parameter.declared,
    )


def _tidy(words: list[str]) -> str:
    """Tokens as one would write them: `vec<T, 4>`."""
    return re.sub(r" ?(::|[<>]) ?", r"\1", " ".join(words)).replace(" ,", ",")


def _arrays(s: Stream, definition: kernels.Definition) -> list[Array]:
    arrays = []
    for k in s.code(definition.body, definition.end):
        storage = threadgroup_storage(s, k) if s[k] == "threadgroup" else None
        for part in storage.declarators if storage else ():
            sizes = re.findall(r"\[([^\]]*)\]", "".join(s[p] for p in part))
            arrays.append(Array(s[part[0]], storage.type if storage else "", tuple(sizes)))
    return arrays


def _constants(s: Stream, scopes: Scopes) -> dict[str, str]:
    """Constants at program scope, with the texts of their values."""
    constants = {}
    for start in scopes.program_statements:
        if s[start] in ("constant", "constexpr", "static", "const"):
            constants.update(_declared_constants(s, s.code(start, s.statement_end(start) + 1)))
    return constants


def _declared_constants(s: Stream, positions: list[int]) -> dict[str, str]:
    """`constexpr int N = 4;` and the like among these tokens."""
    constants = {}
    for k in positions:
        if s[k] not in ("constexpr", "constant", "const"):
            continue
        end = s.statement_end(k)
        parts = [p for p in s.code(k, end) if s[p] == "="]
        if parts:
            constants[s[s.before(parts[0])]] = s.text(parts[0] + 1, end).strip()
    return constants


def _type_bytes(name: str, values: Mapping[str, str]) -> int | None:
    """Size of a type, None where the text does not tell it."""
    name = name.replace("metal :: ", "")
    if name in _SCALAR_BYTES:
        return _SCALAR_BYTES[name]
    if name in values:
        return _type_bytes(values[name], {k: v for k, v in values.items() if k != name})
    if name.startswith("atomic_"):
        return _type_bytes(name.removeprefix("atomic_"), values)
    vector, generic = _VECTOR.fullmatch(name), _GENERIC.fullmatch(name)
    if vector:
        return _vector_bytes(_SCALAR_BYTES.get(vector[2]), int(vector[3]), bool(vector[1]))
    if generic and generic[1] == "vec":
        return _vector_bytes(
            _type_bytes(generic[2], values), _evaluate(generic[3] or "", values), False
        )
    return _type_bytes(generic[2], values) if generic else None


def _vector_bytes(element: int | None, count: int | None, packed: bool) -> int | None:
    if element is None or count is None:
        return None
    return element * (4 if count == 3 and not packed else count)


def _evaluate(text: str, values: Mapping[str, str]) -> int | None:
    """The value of an integer expression, None where it is not known."""

    def size(match: re.Match[str]) -> str:
        return str(_type_bytes(match[1].strip(), values))

    def value(node: ast.expr) -> int | None:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name) and node.id in values:
            others = {k: v for k, v in values.items() if k != node.id}
            return _evaluate(values[node.id], others)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = value(node.left), value(node.right)
            if left is not None and right is not None:
                return int(_OPERATORS[type(node.op)](left, right))
        return None

    plain = re.sub(r"\bsizeof\s*\(([^()]*)\)", size, text)
    plain = re.sub(r"\b(0[xX][0-9a-fA-F]+|\d+)[uUlL]+\b", r"\1", plain).replace("/", "//")
    try:
        return value(ast.parse(plain.strip(), mode="eval").body)
    except SyntaxError:
        return None
