# SPDX-License-Identifier: MIT
"""Reads textual LLVM IR: functions, blocks, instructions. No more of it than a count needs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_NAME = r'%(?:[-\w.$]+|"[^"]*")'
_VALUE = re.compile(_NAME)
_DEFINE = re.compile(r'^define .*?@("?)([^"(]+)\1\((.*)\)[^()]*\{$')
_TYPE_NAME = re.compile(rf"^({_NAME}) = type (.*)$")
_LABEL = re.compile(r'^("[^"]*"|[-\w.$]+):')
_RESULT = re.compile(rf"^  ({_NAME}) = (.*)$")
_DEBUG = re.compile(r", !dbg !(\d+)")
_METADATA = re.compile(r"(?:, !\w[\w.]* !\d+)+\s*$")
_FLAGS = re.compile(
    r"^(?:(?:tail|musttail|notail|nuw|nsw|nusw|nneg|exact|disjoint|samesign|fast|nnan|ninf|nsz|arcp"
    r"|contract|afn|reassoc|inbounds|volatile|atomic|weak|noundef|nonnull|range\([^)]*\)"
    r"|nofpclass\([^)]*\)|fastcc|spir_func|zeroext|signext|inrange\([^)]*\)|align \d+"
    r"|dereferenceable(?:_or_null)?\(\d+\)) )+"
)
_SCALAR = {"half": 1, "bfloat": 1, "float": 2, "double": 4, "ptr": 4}
_VECTOR = re.compile(r"^<(\d+) x (.+)>$")
_PHI = re.compile(rf"\[ (.+?), ({_NAME}) \]")
_TARGET = re.compile(rf"label ({_NAME})")
_CALLEE = re.compile(r'@("?)([^"(]+)\1\(')


@dataclass(slots=True)
class Instruction:
    """`name = opcode type ...`; `name` is empty where there is no result, `type` is the result's.

    `operands` are the named values it uses. Of a phi they are those of `sources`, block by block.
    """

    name: str
    opcode: str
    type: str
    text: str
    debug: str
    operands: tuple[str, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()
    callee: str = ""


@dataclass(slots=True)
class Block:
    name: str
    instructions: list[Instruction] = field(default_factory=list)
    successors: tuple[str, ...] = ()


@dataclass(slots=True)
class Function:
    """Its blocks in the order of the text, the entry first."""

    name: str
    parameters: list[str]
    blocks: dict[str, Block] = field(default_factory=dict)


def lanes(type: str) -> tuple[int, str]:
    """How many values a type holds, and of what type: a vector's elements, or one."""
    vector = _VECTOR.match(type)
    return (int(vector[1]), vector[2]) if vector else (1, type)


def bits(type: str) -> int:
    """Of a scalar."""
    if type[0] == "i" and type[1:].isdigit():
        return int(type[1:])
    return 16 * _SCALAR.get(type.partition(" ")[0], 0)


def split(text: str) -> list[str]:
    """The parts between the commas that stand outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "([{<":
            depth += 1
        elif c in ")]}>":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return parts


def typed(part: str) -> tuple[str, str]:
    """`<4 x float> %v` as its type and its value."""
    type, _, value = _FLAGS.sub("", part).strip().partition(" ")
    while type.count("<") + type.count("[") + type.count("{") > (
        type.count(">") + type.count("]") + type.count("}")
    ):
        more, _, value = value.partition(" ")
        type += " " + more
    if value.startswith("addrspace("):
        more, _, value = value.partition(" ")
        type += " " + more
    return type, value.rpartition(" ")[2] if value.startswith("noundef") else value


def read(lines: Iterable[str], wanted: str = "") -> list[Function]:
    """The functions whose names start with `wanted`."""
    functions: list[Function] = []
    types: set[str] = set()
    function: Function | None = None
    block = Block("")
    pending = ""
    for line in lines:
        if function is None:
            if line.startswith("define"):
                head = _DEFINE.match(line)
                if head and head[2].startswith(wanted):
                    names = [_VALUE.findall(p) for p in split(head[3])]
                    function = Function(head[2], [n[-1] for n in names if n])
                    block = Block("")
            elif declared := _TYPE_NAME.match(line):
                types.add(declared[1])
            continue
        if line == "}":
            functions.append(function)
            function = None
        elif pending:
            pending += line.strip() + " "
            if line.lstrip().startswith("]"):
                _add(block, pending, types)
                pending = ""
        elif line.startswith("  ") and not line.lstrip().startswith(("#dbg", ";")):
            if block.name == "":
                block.name = "%0"
                function.blocks[block.name] = block
            if line.startswith("  switch"):
                pending = line + " "
            else:
                _add(block, line, types)
        elif label := _LABEL.match(line):
            block = Block("%" + label[1])
            function.blocks[block.name] = block
    return functions


def _add(block: Block, line: str, types: set[str]) -> None:
    debug = _DEBUG.search(line)
    text = _METADATA.sub("", line)
    if ", !" in text:
        text = text[: text.index(", !")]
    result = _RESULT.match(text)
    name, body = (result[1], result[2]) if result else ("", text.strip())
    opcode, _, rest = body.partition(" ")
    if opcode in ("tail", "musttail", "notail"):
        opcode, _, rest = rest.partition(" ")
    instruction = Instruction(name, opcode, "", _FLAGS.sub("", rest), debug[1] if debug else "")
    if opcode in ("br", "switch"):
        block.successors = tuple(dict.fromkeys(_TARGET.findall(text)))
        instruction.operands = tuple(
            v for v in _VALUE.findall(rest.partition("label")[0]) if v not in types
        )
    elif opcode == "phi":
        instruction.type = typed(instruction.text)[0]
        instruction.sources = tuple((v, b) for v, b in _PHI.findall(rest))
    else:
        instruction.operands = tuple(v for v in _VALUE.findall(rest) if v not in types)
        instruction.type = _type(instruction)
        callee = _CALLEE.search(rest) if opcode == "call" else None
        instruction.callee = callee[2] if callee else ""
    block.instructions.append(instruction)


_CASTS = {"ptrtoint", "inttoptr", "bitcast", "addrspacecast", "trunc", "zext", "sext"}
_CASTS |= {"fptrunc", "fpext", "fptoui", "fptosi", "uitofp", "sitofp"}


def _type(i: Instruction) -> str:
    """Of the result."""
    if not i.name:
        return "void"
    if i.opcode in _CASTS:
        return i.text.rpartition(" to ")[2].strip()
    if i.opcode in ("icmp", "fcmp"):
        count, _ = lanes(typed(i.text.partition(" ")[2])[0])
        return "i1" if count == 1 else f"<{count} x i1>"
    if i.opcode in ("getelementptr", "select", "atomicrmw"):
        return typed(split(i.text)[1])[0]
    if i.opcode == "alloca":
        return "ptr"
    if i.opcode == "extractelement":
        return lanes(typed(split(i.text)[0])[0])[1]
    if i.opcode == "shufflevector":
        parts = split(i.text)
        count, _ = lanes(typed(parts[2])[0])
        return f"<{count} x {lanes(typed(parts[0])[0])[1]}>"
    if i.opcode == "extractvalue":
        whole, *path = split(i.text)
        return _member(typed(whole)[0], path)
    if i.opcode == "load":
        return split(i.text)[0]
    return typed(i.text)[0]


def _member(aggregate: str, path: list[str]) -> str:
    for index in path:
        inside = aggregate.strip()[1:-1].strip()
        if " x " in inside and aggregate.startswith("["):
            aggregate = inside.partition(" x ")[2]
        elif aggregate.startswith("{"):
            aggregate = split(inside)[int(index)]
        else:
            return "i32"
    return aggregate
