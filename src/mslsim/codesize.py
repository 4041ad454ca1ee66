# SPDX-License-Identifier: MIT
"""How many bytes of a GPU's machine code a function of LLVM IR becomes, by block."""

from __future__ import annotations

from .pressure import Liveness, Step, is_long_division
from .ssa import Function, Instruction, bits, lanes, split, typed
from .values import Values

# Bytes for each value that an instruction makes, by kind: fitted to the code that Mesa's compiler
# makes of 219 kernels (median ratio 1.03, eight of ten between 0.64 and 1.17).
_START = 120
_ARITHMETIC, _LONG = 4, 24
_MULTIPLY_LONG, _COMPARE_LONG = 20, 8
_ADDRESS, _ACCESS = 8, 11
_BRANCH, _COPY = 27, 10
_COLLECTIVE, _SYNCHRONISE, _CALL, _SPECIAL = 33, 10, 120, 12
_DIVIDE_REAL, _DIVIDE, _DIVIDE_LONG, _DIVIDE_LONG_BY_CONSTANT = 54, 70, 3300, 400
_DIVISIONS = frozenset({"sdiv", "udiv", "srem", "urem"})
_NO_CODE = ("llvm.lifetime", "llvm.assume", "llvm.experimental.noalias")
_FUNCTIONS = ("llvm.exp", "llvm.log", "llvm.sqrt", "llvm.sin", "llvm.cos")


def code_of(values: Values, live: Liveness) -> dict[str, int]:
    """Bytes of each block."""
    code = {}
    for name, block in values.function.blocks.items():
        copies = sum(len(values.pieces(i.name)) for i in block.instructions if i.opcode == "phi")
        code[name] = _COPY * copies + sum(_bytes(values, step) for step in live.steps[name])
    first = next(iter(code))
    code[first] += _START
    return code


def _bytes(values: Values, step: Step) -> int:
    i = step.instruction
    if i.name and values.is_shared(i.name):
        return 0
    if i.opcode in ("load", "store"):
        return 0 if _is_handed_over(values, i) else _ACCESS
    if i.opcode == "br":
        return _BRANCH if i.operands else 0
    if i.opcode == "call":
        return _call(i, len(step.writes) or 1)
    if i.name and not step.writes:
        return 0
    if i.opcode in _DIVISIONS:
        return _division(i)
    if i.opcode == "getelementptr":
        return _ADDRESS
    if i.opcode == "fdiv":
        return _DIVIDE_REAL * len(step.writes)
    if i.opcode == "icmp" and bits(lanes(typed(i.text.partition(" ")[2])[0])[1]) == 64:
        return _COMPARE_LONG
    if i.type == "i64":
        return _MULTIPLY_LONG if i.opcode == "mul" else _LONG
    return _ARITHMETIC * (len(step.writes) or 1)


def _is_handed_over(values: Values, access: Instruction) -> bool:
    """Whether it is to a local variable that is no array: there a simdgroup's operation finds its
    operands, which are in registers on a GPU."""
    address = access.operands[-1] if access.operands else ""
    made = values.instructions.get(address)
    while made and made.opcode == "getelementptr":
        made = values.instructions.get(typed(split(made.text)[1])[1])
    return made is not None and made.opcode == "alloca" and not made.text.startswith("[")


def _call(i: Instruction, count: int) -> int:
    if i.callee.startswith(_NO_CODE):
        return 0
    if i.callee == "msl_collective":
        # loads and stores of matrices only state that all lanes take part
        is_product = "msl_serve_multiply" in i.text
        return _SYNCHRONISE if is_product else 0 if "msl_serve_nothing" in i.text else _COLLECTIVE
    if i.callee.startswith("msl_"):
        return _SYNCHRONISE
    if i.callee.startswith(_FUNCTIONS):
        return _SPECIAL * count
    return (_ARITHMETIC if i.callee.startswith("llvm.") else _CALL) * count


def _division(i: Instruction) -> int:
    if i.type != "i64":
        return _DIVIDE if split(i.text)[1].startswith("%") else _ARITHMETIC * 4
    return _DIVIDE_LONG if is_long_division(i) else _DIVIDE_LONG_BY_CONSTANT


def largest_loop(function: Function, code: dict[str, int]) -> tuple[int, str]:
    """Bytes of the largest loop, without those of loops in it, and its debug location."""
    loops = _loops(function)
    most, where = 0, ""
    for head, body in loops.items():
        inner = set[str]().union(*(b for h, b in loops.items() if h != head and b < body))
        size = sum(code[name] for name in body - inner)
        if size > most:
            most, where = size, _location(function, head)
    return most, where


def _location(function: Function, block: str) -> str:
    return next((i.debug for i in function.blocks[block].instructions if i.debug), "")


def _loops(function: Function) -> dict[str, set[str]]:
    """The blocks of each loop, by its first one."""
    before: dict[str, list[str]] = {name: [] for name in function.blocks}
    for name, block in function.blocks.items():
        for successor in block.successors:
            before[successor].append(name)
    loops: dict[str, set[str]] = {}
    for tail, head in _back_edges(function):
        body = loops.setdefault(head, {head})
        pending = [tail]
        while pending:
            name = pending.pop()
            if name not in body:
                body.add(name)
                pending += before[name]
    return loops


def _back_edges(function: Function) -> list[tuple[str, str]]:
    """Edges to a block that is on the way to them."""
    first = next(iter(function.blocks))
    edges: list[tuple[str, str]] = []
    seen, on_the_way = {first}, {first}
    path = [(first, iter(function.blocks[first].successors))]
    while path:
        name, successors = path[-1]
        successor = next(successors, None)
        if successor is None:
            path.pop()
            on_the_way.discard(name)
        elif successor in on_the_way:
            edges.append((name, successor))
        elif successor not in seen:
            seen.add(successor)
            on_the_way.add(successor)
            path.append((successor, iter(function.blocks[successor].successors)))
    return edges
