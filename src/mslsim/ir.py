# SPDX-License-Identifier: MIT
"""Textual LLVM IR of a kernel as blocks of instructions, with what is known of their values.

A value is uniform when it is the same for every thread of a launch: sizes, `constant` arguments,
and what is computed from them alone. A GPU computes it once, before the first thread.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from .worker import BUFFERS

_NAME = re.compile(r'%(?:[\w.$-]+|"[^"]+")')
_LINE = re.compile(
    r'^  (?:(%(?:[\w.$-]+|"[^"]+")) = )?(?:tail |musttail |notail )?([a-z]\w*)\b(.*)$'
)
_TYPE_NAME = re.compile(r'%"?(?:struct|class|union)\.')
_LABEL = re.compile(r'^((?:[\w.$-]+|"[^"]+")):')
_DEBUG = re.compile(r", !dbg !(\d+)")
_TYPE = re.compile(r"<(\d+) x ([\w]+)>|\b(i\d+|half|bfloat|float|double|ptr)\b")
_CONSTANT_OFFSET = re.compile(r"getelementptr .*ptr (%[\w.$-]+), i64 (-?\d+)$")
_POINTERS = frozenset({"getelementptr", "phi", "select", "bitcast", "freeze"})
# Their results depend on their operands alone.
_PURE = frozenset(
    {
        *("add", "sub", "mul", "shl", "lshr", "ashr", "and", "or", "xor"),
        *("udiv", "sdiv", "urem", "srem", "fadd", "fsub", "fmul", "fdiv", "frem", "fneg"),
        *("icmp", "fcmp", "select", "zext", "sext", "trunc", "fpext", "fptrunc", "bitcast"),
        *("sitofp", "uitofp", "fptosi", "fptoui", "getelementptr", "freeze"),
        *("extractelement", "insertelement", "shufflevector"),
    }
)
TERMINATORS = frozenset({"br", "ret", "switch", "unreachable"})

# Of msl::Group in abi.h: a threadgroup's own position comes first.
_POSITION_BYTES = 12
_POINTER_BYTES = 8


@dataclass(slots=True)
class Instruction:
    """One line: `result = opcode rest`. `place` is the number of its debug location, or ""."""

    result: str
    opcode: str
    rest: str
    place: str
    operands: list[str]
    uniform: bool = False
    # what a pointer it uses leads to: "buffer 3", "threadgroup", "thread", or "" for unknown
    leads_to: str = ""

    @property
    def called(self) -> str:
        match = re.search(r'@([\w.$]+|"[^"]+")\(', self.rest)
        return match[1] if match else ""

    def type(self) -> tuple[int, str]:
        """Lanes and element of the first type that it names."""
        match = _TYPE.search(self.rest)
        if not match:
            return 1, ""
        return (int(match[1]), match[2]) if match[1] else (1, match[3])


@dataclass(slots=True)
class Block:
    label: str
    instructions: list[Instruction] = field(default_factory=list)
    # index of the line that ends it
    end: int = 0


@dataclass(slots=True)
class Function:
    """The function that runs one thread; `thread` is its parameter with the thread's index."""

    thread: str
    blocks: list[Block]
    users: dict[str, list[Instruction]]
    makers: dict[str, Instruction]


def read_function(lines: list[str], symbol: str, constant: Collection[int]) -> Function:
    """The function `symbol` of a module. `constant` are the buffers in constant memory."""
    start = next(
        i for i, line in enumerate(lines) if line.startswith("define") and f"@{symbol}(" in line
    )
    parameters = _NAME.findall(lines[start].partition("(")[2])
    blocks = [Block("entry")]
    for at in range(start + 1, len(lines)):
        line = lines[at]
        if line.startswith("}"):
            break
        if label := _LABEL.match(line):
            if blocks[-1].instructions:
                blocks.append(Block(label[1]))
            continue
        if match := _LINE.match(line):
            instruction = _instruction(match)
            blocks[-1].instructions.append(instruction)
            if instruction.opcode in TERMINATORS:
                blocks[-1].end = at
    made = {i.result: i for b in blocks for i in b.instructions if i.result}
    users: dict[str, list[Instruction]] = {}
    for block in blocks:
        for instruction in block.instructions:
            for name in instruction.operands:
                users.setdefault(name, []).append(instruction)
    function = Function(parameters[2], blocks, users, made)
    _Values(parameters, constant).look(function)
    return function


def _instruction(match: re.Match[str]) -> Instruction:
    result, opcode, rest = match[1] or "", match[2], match[3]
    debug = _DEBUG.search(rest)
    rest = rest[: debug.start()] if debug else rest
    operands = [name for name in _NAME.findall(rest) if not _TYPE_NAME.match(name)]
    return Instruction(result, opcode, rest, debug[1] if debug else "", operands)


class _Values:
    """Finds what is uniform and where pointers lead, in the order of the text, twice: a loop's
    values come before what they are made of."""

    def __init__(self, parameters: list[str], constant: Collection[int]) -> None:
        self.arguments, self.group = parameters[:2]
        self.constant = {f"buffer {index}" for index in constant}
        self.uniform: set[str] = {self.arguments}
        self.leads_to: dict[str, str] = {self.arguments: "arguments", self.group: "group"}
        self.offsets: dict[str, int] = {self.arguments: 0, self.group: 0}

    def look(self, function: Function) -> None:
        for _ in range(2):
            for block in function.blocks:
                for instruction in block.instructions:
                    self._look(instruction)

    def _look(self, i: Instruction) -> None:
        names = [self.leads_to[o] for o in i.operands if self.leads_to.get(o)]
        i.leads_to = names[0] if names else ""
        if i.opcode == "getelementptr":
            self._offset(i)
        if i.opcode in _POINTERS and i.leads_to:
            self.leads_to[i.result] = i.leads_to
        elif i.opcode == "alloca":
            self.leads_to[i.result] = "thread"
        elif i.opcode == "call" and i.called == "msl_threadgroup_memory":
            self.leads_to[i.result] = "threadgroup"
        elif i.opcode == "load":
            self._load(i)
        i.uniform = i.result in self.uniform or self._same_for_all(i)
        if i.uniform and i.result:
            self.uniform.add(i.result)

    def _offset(self, i: Instruction) -> None:
        match = _CONSTANT_OFFSET.search("getelementptr" + i.rest)
        if match and match[1] in self.offsets:
            self.offsets[i.result] = self.offsets[match[1]] + int(match[2])

    def _load(self, i: Instruction) -> None:
        pointer = i.operands[0] if i.operands else ""
        offset = self.offsets.get(pointer)
        if i.leads_to == "arguments" and offset is not None:
            index = offset // _POINTER_BYTES
            self.leads_to[i.result] = f"buffer {index}" if index < BUFFERS else "threadgroup"
            self.uniform.add(i.result)
        elif i.leads_to == "group":
            self._mark(i, offset is not None and offset >= _POSITION_BYTES)
        elif i.leads_to in self.constant:
            self._mark(i, pointer in self.uniform)

    def _mark(self, i: Instruction, uniform: bool) -> None:
        if uniform:
            self.uniform.add(i.result)

    def _same_for_all(self, i: Instruction) -> bool:
        pure = i.opcode in _PURE or (i.opcode == "call" and i.called.startswith("llvm."))
        return pure and bool(i.result) and all(o in self.uniform for o in i.operands if o[0] == "%")
