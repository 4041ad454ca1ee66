# SPDX-License-Identifier: MIT
"""Which instructions of a kernel a GPU would issue, by line, and counters of how often.

Instructions are those of the optimised intermediate code, in the classes of `costs.toml`. What
costs nothing on a GPU is left out: computing the thread's position, uniform values, parts of
vectors, signs, a comparison beside its choice, and an index of 32 bits in an address.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from .ir import Block, Function, Instruction, read_function
from .sites import Locations

MAX_THREADS = 1024
# Bytes that one instruction loads or stores.
_ACCESS_BYTES = 16
_BYTES = {"i1": 1, "i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i64": 8, "ptr": 8, "double": 8}

_FREE = frozenset(
    {
        *("alloca", "zext", "trunc", "bitcast", "freeze", "fneg", "phi", "ret", "unreachable"),
        *("extractelement", "insertelement", "shufflevector", "extractvalue", "insertvalue"),
        *("inttoptr", "ptrtoint"),
    }
)
_SIMPLE = {
    **dict.fromkeys(("fadd", "fsub", "fmul"), "float"),
    **dict.fromkeys(("fpext", "fptrunc"), "narrow"),
    **dict.fromkeys(("sitofp", "uitofp", "fptosi", "fptoui"), "convert"),
    **dict.fromkeys(("add", "sub", "and", "or", "xor", "sext"), "integer"),
    "mul": "integer_multiply",
    "frem": "function",
    "fence": "barrier",
    "atomicrmw": "atomic",
    "cmpxchg": "atomic",
    "switch": "branch",
}
_LONG = {
    "integer": "long_other",
    "integer_multiply": "long_multiply",
    "shift": "long_shift",
    "convert": "long_convert",
    "integer_divide": "long_divide",
    "integer_divide_by_constant": "long_divide_by_constant",
}
# By the name of an intrinsic, or of a function of C's library without its f; "" costs nothing.
_FUNCTIONS = {
    **dict.fromkeys(("fma", "fmuladd", "maxnum", "minnum", "maximum", "minimum"), "float"),
    **dict.fromkeys(("copysign", "is.fpclass"), "float"),
    **dict.fromkeys(("smax", "smin", "umax", "umin", "abs", "uadd.sat", "usub.sat"), "integer"),
    **dict.fromkeys(("floor", "ceil", "trunc", "rint", "round", "nearbyint"), "convert"),
    **dict.fromkeys(("ctlz", "cttz", "ctpop", "bitreverse", "bswap", "fshl", "fshr"), "shift"),
    **{name: name for name in ("exp", "exp2", "log", "log2", "sqrt", "tanh")},
    **dict.fromkeys(("sin", "cos"), "sine"),
    **dict.fromkeys(("pow", "powi"), "power"),
    "log10": "log",
    "exp10": "exp",
    **dict.fromkeys(("fabs", "lifetime.start", "lifetime.end", "assume"), ""),
    **dict.fromkeys(("experimental.noalias.scope.decl", "dbg.value", "dbg.declare"), ""),
}
_INTRINSIC = re.compile(r"^llvm\.([a-z][\w.]*?)(?:\.(?:v\d+)?(?:[ifp]\d+|bf16))*$")
_REDUCTION = re.compile(r"vector\.reduce\.(\w)")
_SERVE = re.compile(r"msl_serve_(\w+?)(?=I|E)")
_SERVED_VECTOR = re.compile(r"3vecI\w+?Li(\d)E")
_SERVED_WIDTH = re.compile(r"ELi(4|32)E")


Chain = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Counted:
    """Instructions of one class at one place of a block. `place` is the line, then the lines it
    was inlined at, innermost first."""

    place: Chain
    name: str
    count: int


def count_blocks(
    text: str, kernel: str, constant: Collection[int], sources: Collection[str], own: str
) -> tuple[str, list[list[Counted]]]:
    """IR whose blocks count how often each thread of a group was there, in `msl_counts_<kernel>`,
    and the instructions of each block. `kernel` is the linker's name of it."""
    lines = text.split("\n")
    known = Locations(lines, sources, own)
    function = read_function(lines, f"msl_thread_{kernel}", constant)
    blocks = [_counted(block, function, known) for block in function.blocks]
    table = f"@msl_counts_{kernel}"
    for number in reversed(range(len(function.blocks))):
        at = function.blocks[number].end
        lines[at:at] = [
            f"  %msl.row.{number} = zext i32 {function.thread} to i64",
            f"  %msl.at.{number} = getelementptr [{MAX_THREADS} x i64], ptr {table}, "
            f"i64 {number}, i64 %msl.row.{number}",
            f"  %msl.old.{number} = load i64, ptr %msl.at.{number}",
            f"  %msl.new.{number} = add i64 %msl.old.{number}, 1",
            f"  store i64 %msl.new.{number}, ptr %msl.at.{number}",
        ]
    lines.append(f"{table} = global [{len(blocks)} x [{MAX_THREADS} x i64]] zeroinitializer")
    return "\n".join(lines), blocks


def _counted(block: Block, function: Function, known: Locations) -> list[Counted]:
    found: Counter[tuple[Chain, str]] = Counter()
    accesses: dict[tuple[str, str, int, str], list[tuple[int, int, Chain]]] = {}
    place: Chain | None = None
    for i in block.instructions:
        chain = known.chain(i.place)
        # Outermost is the function that starts a thread; where nothing is known, it is the line
        # of the instruction before.
        if chain and chain[0][1]:
            place = tuple((file, line) for file, line, _ in chain[:-1])
        if not place or i.uniform:
            continue
        if not i.called.startswith("msl_") and _inside_simdgroup(i, known):
            continue
        name, count = classify(i, function)
        if name.endswith("memory"):
            _join(i, place, name, function, accesses)
        elif name:
            found[place, name] += count
    for (_, _, _, name), parts in accesses.items():
        for where, bytes_ in _runs(parts):
            found[where, name] += -(-bytes_ // _ACCESS_BYTES)
    return [Counted(place, name, count) for (place, name), count in found.items()]


def _join(
    i: Instruction,
    place: Chain,
    name: str,
    function: Function,
    accesses: dict[tuple[str, str, int, str], list[tuple[int, int, Chain]]],
) -> None:
    """Notes an access by what its address is counted from."""
    lanes, element = i.type()
    size = lanes * _BYTES.get(element, 4)
    pointer, offset = i.operands[-1] if i.operands else "", 0
    while (maker := function.makers.get(pointer)) and maker.opcode == "getelementptr":
        step = re.search(r" i8, ptr (%[\w.$-]+), i64 (-?\d+)$", maker.rest)
        if not step:
            break
        pointer, offset = step[1], offset + int(step[2])
    accesses.setdefault((i.opcode, pointer, size, name), []).append((offset, size, place))


def _runs(parts: list[tuple[int, int, Chain]]) -> list[tuple[Chain, int]]:
    """Accesses side by side are one, as a compiler makes them: the place of the first, and the
    bytes of all."""
    runs: list[tuple[Chain, int]] = []
    end = None
    for offset, size, place in sorted(parts):
        if offset == end and runs[-1][1] + size <= _ACCESS_BYTES:
            runs[-1] = (runs[-1][0], runs[-1][1] + size)
        else:
            runs.append((place, size))
        end = offset + size
    return runs


def _inside_simdgroup(i: Instruction, known: Locations) -> bool:
    """Whether it is how the machine does what is one instruction of a GPU."""
    inside = Path(known.innermost(i.place)).name.startswith("simdgroup")
    return inside and not (i.opcode in ("load", "store") and i.leads_to != "thread")


def classify(i: Instruction, function: Function) -> tuple[str, int]:
    """Its class, "" where it is free, and how many of them."""
    op = i.opcode
    lanes, element = i.type()
    if op in _FREE:
        return "", 0
    if op in ("load", "store"):
        return _access(i, function)
    if op == "getelementptr":
        return _address(i, function)
    if op == "call":
        return _call(i, lanes, element)
    if op == "br":
        return ("branch", 1) if " i1 " in i.rest else ("", 0)
    if op in ("icmp", "fcmp"):
        return _comparison(i, function, lanes, element)
    if op == "select":
        return _choice(i)
    if op == "fdiv":
        return _division(i, function), lanes
    if op in ("udiv", "sdiv", "urem", "srem"):
        if _is_half_of_a_division(i, function):
            return _sized("integer_multiply", element), lanes
        by_constant = bool(re.search(r", -?\d+$|splat", i.rest))
        return _sized("integer_divide" + "_by_constant" * by_constant, element), lanes
    if op in ("shl", "lshr", "ashr"):
        # By 16 bits it is the other half of a register.
        halves = element == "i32" and re.search(r"\b16(?:\)|$)", i.rest)
        return ("integer" if halves else _sized("shift", element)), lanes
    name = _sized(_SIMPLE.get(op, "integer"), element)
    if name == "long_other" and op in ("add", "sub", "sext"):
        name = "long_add"
    if op == "sext":
        name = "integer"
    return name, lanes


def _sized(name: str, element: str) -> str:
    return _LONG.get(name, name) if element in ("i64", "i128", "ptr") else name


def _access(i: Instruction, function: Function) -> tuple[str, int]:
    lanes, element = i.type()
    size = lanes * _BYTES.get(element, 4)
    pointer = i.operands[-1] if i.operands else ""
    name = {"threadgroup": "threadgroup_memory", "thread": "thread_memory"}.get(
        i.leads_to, "memory"
    )
    if name == "thread_memory" and _is_handed_over(pointer, function):
        return "", 0
    return name, -(-size // _ACCESS_BYTES)


def _is_handed_over(pointer: str, function: Function) -> bool:
    """Whether a local variable is only the machine's way to pass a value to a simdgroup."""
    users = function.users.get(pointer, ())
    return any(u.opcode == "call" and u.called.startswith("msl_") for u in users) or any(
        u.opcode == "store" and u.operands[:1] == [pointer] for u in users
    )


def _address(i: Instruction, function: Function) -> tuple[str, int]:
    indices = re.findall(r", i(?:32|64) (%[\w.$-]+|-?\d+)", i.rest)
    moving = [n for n in indices if n.startswith("%")]
    kept = [u for u in function.users.get(i.result, ()) if u.opcode not in ("load", "store")]
    if i.leads_to == "threadgroup":
        return ("integer", len(moving)) if moving else ("", 0)
    if not moving:
        # A pointer that steps through memory.
        return ("long_add", 1) if any(u.opcode == "phi" for u in kept) else ("", 0)
    short = all(_is_short(n, function) for n in moving)
    based = any(u.opcode != "getelementptr" for u in kept)
    if short and len(moving) == 1 and not based:
        return "", 0
    return "long_add", len(moving)


def _is_short(name: str, function: Function) -> bool:
    """Whether an index has 32 bits before it is made longer."""
    maker = function.makers.get(name)
    return maker is not None and maker.opcode in ("zext", "sext")


def _comparison(i: Instruction, function: Function, lanes: int, element: str) -> tuple[str, int]:
    long = element in ("i64", "i128")
    users = function.users.get(i.result, ())
    if all(u.opcode in ("select", "br") for u in users):
        return ("long_other", lanes) if long else ("", 0)
    return ("long_other" if long else "integer"), lanes


def _choice(i: Instruction) -> tuple[str, int]:
    # The condition comes first, then the type of what is chosen.
    match = re.search(r", (?:<(\d+) x (\w+)>|(\w+)) ", i.rest)
    if not match:
        return "integer", 1
    lanes, element = (int(match[1]), match[2]) if match[1] else (1, match[3])
    return ("long_other" if element in ("i64", "ptr") else "integer"), lanes


def _division(i: Instruction, function: Function) -> str:
    one = re.search(
        r"(?:float|half) -?1\.0+e\+00, |splat \((?:float|half) -?1\.0+e\+00\), ", i.rest
    )
    if not one:
        return "divide"
    maker = function.makers.get(i.operands[-1]) if i.operands else None
    return "rsqrt" if maker and maker.called.startswith("llvm.sqrt") else "reciprocal"


def _is_half_of_a_division(i: Instruction, function: Function) -> bool:
    """A remainder beside the quotient of the same numbers."""
    if not i.opcode.endswith("rem") or not i.operands:
        return False
    sign = i.opcode[0]
    return any(
        u.opcode == f"{sign}div" and u.operands == i.operands
        for u in function.users.get(i.operands[0], ())
    )


def _call(i: Instruction, lanes: int, element: str) -> tuple[str, int]:
    called = i.called
    if called.startswith("msl_"):
        return _machine_call(i, called)
    match = _INTRINSIC.match(called)
    name = match[1] if match else called.removesuffix("f")
    if reduction := _REDUCTION.match(name):
        return ("float" if reduction[1] == "f" else "integer"), max(1, lanes - 1)
    if name.startswith(("memcpy", "memset", "memmove")):
        size = re.search(r"i64 (\d+)", i.rest)
        return "thread_memory", -(-int(size[1]) // _ACCESS_BYTES) if size else 1
    if name == "sqrt" or name not in _FUNCTIONS:
        return _FUNCTIONS.get(name, "function"), lanes
    return _sized(_FUNCTIONS[name], element), lanes if _FUNCTIONS[name] else 0


def _machine_call(i: Instruction, called: str) -> tuple[str, int]:
    if called == "msl_threadgroup_barrier":
        return "barrier", 1
    if called != "msl_collective":
        return "", 0
    serve = _SERVE.search(i.rest)
    kind = serve[1] if serve else ""
    vector = _SERVED_VECTOR.search(i.rest)
    lanes = int(vector[1]) if vector else 1
    if kind in ("reduce", "scan"):
        width = _SERVED_WIDTH.search(i.rest)
        return ("quad_reduce" if width and width[1] == "4" else "simd_reduce"), lanes
    if kind == "multiply":
        return "matrix_product", 1
    if kind == "nothing":
        # A barrier of the simdgroup, or the mark of a load that is counted by itself.
        return "", 0
    return ("ballot" if kind == "ballot" else "shuffle"), lanes
