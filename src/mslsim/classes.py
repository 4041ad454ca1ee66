# SPDX-License-Identifier: MIT
"""Instructions of LLVM IR in the classes of `costs.toml`, as a GPU would issue them."""

from __future__ import annotations

import re
from pathlib import Path

from .shared import POINTER, Shared
from .sites import Locations
from .ssa import Function, Instruction, split, typed
from .text.kernels import Kernel
from .values import Values
from .worker import BUFFERS

# Bytes that one instruction loads or stores.
ACCESS_BYTES = 16

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
_TYPE = re.compile(r"<(\d+) x (\w+)>|\b(i\d+|half|bfloat|float|double|ptr)\b")
_ONE_OVER = re.compile(r"(?:float|half) -?1\.0+e\+00, |splat \((?:float|half) -?1\.0+e\+00\), ")
_POINTERS = frozenset({"getelementptr", "phi", "select", "bitcast", "freeze"})
_SERVED_WIDTH = re.compile(r"ELi(4|32)E")


class Code:
    """The function that runs one thread of a kernel, and what is known of its values."""

    def __init__(self, kernel: Kernel, function: Function) -> None:
        self.function = function
        self.shared = Shared(kernel, function)
        self._values = Values(function, self.shared)
        self.makers = self._values.instructions
        self.users: dict[str, list[Instruction]] = {}
        self._spaces: dict[str, str] = {}
        for block in function.blocks.values():
            for i in block.instructions:
                for name in (*i.operands, *(value for value, _ in i.sources)):
                    self.users.setdefault(name, []).append(i)
        # in the order of the text, in which each needs little but what is known
        for name in self.makers:
            self.space(name)

    def is_shared(self, i: Instruction) -> bool:
        """Whether a GPU computes it once, before the first thread."""
        return bool(i.name) and self._values.is_shared(i.name)

    def space(self, pointer: str) -> str:
        """The memory that a pointer leads to: "threadgroup", "thread", or "" for any other."""
        if pointer not in self._spaces:
            self._spaces[pointer] = ""
            maker = self.makers.get(pointer)
            self._spaces[pointer] = self._space(maker) if maker else ""
        return self._spaces[pointer]

    def _space(self, i: Instruction) -> str:
        if i.opcode == "alloca":
            return "thread"
        if i.callee == "msl_threadgroup_memory":
            return "threadgroup"
        if i.opcode == "load" and i.operands:
            root, offset = self.shared.root(i.operands[0])
            past = root == self.shared.arguments and (offset or 0) >= BUFFERS * POINTER
            return "threadgroup" if past else ""
        if i.opcode not in _POINTERS:
            return ""
        sources = (*i.operands, *(value for value, _ in i.sources))
        return next(filter(None, map(self.space, sources)), "")


def pointer_of(i: Instruction) -> str:
    """The address of a load or store."""
    return typed(split(i.text)[1])[1]


def type_of(i: Instruction) -> tuple[int, str]:
    """Lanes and element of the first type that it names: that of its operands."""
    match = _TYPE.search(i.text)
    if not match:
        return 1, ""
    return (int(match[1]), match[2]) if match[1] else (1, match[3])


def inside_simdgroup(i: Instruction, code: Code, known: Locations) -> bool:
    """Whether it is how the machine does what is one instruction of a GPU."""
    if not Path(known.innermost(i.debug)).name.startswith("simdgroup"):
        return False
    return i.opcode not in ("load", "store") or code.space(pointer_of(i)) == "thread"


def classify(i: Instruction, code: Code) -> tuple[str, int]:
    """Its class, "" where it is free, and how many of them."""
    op = i.opcode
    lanes, element = type_of(i)
    if op in _FREE:
        return "", 0
    if op in ("load", "store"):
        return _access(i, code), 1
    if op == "getelementptr":
        return _address(i, code)
    if op == "call":
        return _call(i, code, lanes, element)
    if op == "br":
        return ("branch", 1) if i.text.startswith("i1 ") else ("", 0)
    if op in ("icmp", "fcmp"):
        return _comparison(i, code, lanes, element)
    if op == "select":
        return _choice(i)
    if op == "fdiv":
        return _division(i, code), lanes
    if op in ("udiv", "sdiv", "urem", "srem"):
        if _is_half_of_a_division(i, code):
            return _sized("integer_multiply", element), lanes
        by_constant = bool(re.search(r", -?\d+$|splat", i.text))
        return _sized("integer_divide" + "_by_constant" * by_constant, element), lanes
    if op in ("shl", "lshr", "ashr"):
        # By 16 bits it is the other half of a register.
        halves = element == "i32" and re.search(r"\b16(?:\)|$)", i.text)
        return ("integer" if halves else _sized("shift", element)), lanes
    name = _sized(_SIMPLE.get(op, "integer"), element)
    if name == "long_other" and op in ("add", "sub", "sext"):
        name = "long_add"
    if op == "sext":
        name = "integer"
    return name, lanes


def _sized(name: str, element: str) -> str:
    return _LONG.get(name, name) if element in ("i64", "i128", "ptr") else name


def _access(i: Instruction, code: Code) -> str:
    pointer = pointer_of(i)
    space = code.space(pointer)
    if space == "thread" and _is_handed_over(code.shared.root(pointer)[0], code):
        return ""
    return f"{space}_memory" if space else "memory"


def _is_handed_over(pointer: str, code: Code) -> bool:
    """Whether a local variable is only the machine's way to pass a value to a simdgroup."""
    return any(
        u.callee.startswith("msl_") or (u.opcode == "store" and pointer_of(u) != pointer)
        for u in code.users.get(pointer, ())
    )


def _address(i: Instruction, code: Code) -> tuple[str, int]:
    indices = re.findall(r", i(?:32|64) (%[\w.$-]+|-?\d+)", i.text)
    moving = [n for n in indices if n.startswith("%")]
    kept = [u for u in code.users.get(i.name, ()) if u.opcode not in ("load", "store")]
    if code.space(i.name) == "threadgroup":
        return ("integer", len(moving)) if moving else ("", 0)
    if not moving:
        # A pointer that steps through memory.
        return ("long_add", 1) if any(u.opcode == "phi" for u in kept) else ("", 0)
    short = all(_is_short(n, code) for n in moving)
    based = any(u.opcode != "getelementptr" for u in kept)
    if short and len(moving) == 1 and not based:
        return "", 0
    return "long_add", len(moving)


def _is_short(name: str, code: Code) -> bool:
    """Whether an index has 32 bits before it is made longer."""
    maker = code.makers.get(name)
    return maker is not None and maker.opcode in ("zext", "sext")


def _comparison(i: Instruction, code: Code, lanes: int, element: str) -> tuple[str, int]:
    long = element in ("i64", "i128")
    users = code.users.get(i.name, ())
    if all(u.opcode in ("select", "br") for u in users):
        return ("long_other", lanes) if long else ("", 0)
    return ("long_other" if long else "integer"), lanes


def _choice(i: Instruction) -> tuple[str, int]:
    # The condition comes first, then the type of what is chosen.
    match = re.search(r", (?:<(\d+) x (\w+)>|(\w+)) ", i.text)
    if not match:
        return "integer", 1
    lanes, element = (int(match[1]), match[2]) if match[1] else (1, match[3])
    return ("long_other" if element in ("i64", "ptr") else "integer"), lanes


def _division(i: Instruction, code: Code) -> str:
    if not _ONE_OVER.search(i.text):
        return "divide"
    maker = code.makers.get(i.operands[-1]) if i.operands else None
    return "rsqrt" if maker and maker.callee.startswith("llvm.sqrt") else "reciprocal"


def _is_rsqrt(user: Instruction) -> bool:
    """Of a root: whether it is taken to divide one by it, which is one instruction."""
    return user.opcode == "fdiv" and bool(_ONE_OVER.search(user.text))


def _is_half_of_a_division(i: Instruction, code: Code) -> bool:
    """A remainder beside the quotient of the same numbers."""
    if not i.opcode.endswith("rem") or not i.operands:
        return False
    sign = i.opcode[0]
    return any(
        u.opcode == f"{sign}div" and u.operands == i.operands
        for u in code.users.get(i.operands[0], ())
    )


def _call(i: Instruction, code: Code, lanes: int, element: str) -> tuple[str, int]:
    called = i.callee
    if called.startswith("msl_"):
        return _machine_call(i, called)
    match = _INTRINSIC.match(called)
    name = match[1] if match else called.removesuffix("f")
    if reduction := _REDUCTION.match(name):
        return ("float" if reduction[1] == "f" else "integer"), max(1, lanes - 1)
    if name.startswith(("memcpy", "memset", "memmove")):
        size = re.search(r"i64 (\d+)", i.text)
        return "thread_memory", -(-int(size[1]) // ACCESS_BYTES) if size else 1
    if name == "sqrt" and all(_is_rsqrt(u) for u in code.users.get(i.name, ())):
        return "", 0
    if name not in _FUNCTIONS:
        return "function", lanes
    return _sized(_FUNCTIONS[name], element), lanes if _FUNCTIONS[name] else 0


def _machine_call(i: Instruction, called: str) -> tuple[str, int]:
    if called == "msl_threadgroup_barrier":
        return "barrier", 1
    if called != "msl_collective":
        return "", 0
    serve = _SERVE.search(i.text)
    kind = serve[1] if serve else ""
    vector = _SERVED_VECTOR.search(i.text)
    lanes = int(vector[1]) if vector else 1
    if kind in ("reduce", "scan"):
        width = _SERVED_WIDTH.search(i.text)
        return ("quad_reduce" if width and width[1] == "4" else "simd_reduce"), lanes
    if kind == "multiply":
        return "matrix_product", 1
    if kind == "nothing":
        # A barrier of the simdgroup, or the mark of a load that is counted by itself.
        return "", 0
    return ("ballot" if kind == "ballot" else "shuffle"), lanes
