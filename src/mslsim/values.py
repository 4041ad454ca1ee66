# SPDX-License-Identifier: MIT
"""The values of a function of LLVM IR as registers of a GPU thread.

Counted in half registers, of 16 bits. A value is in pieces of at most 32 bits, each with a life of
its own: the elements of a vector, the two halves of a 64-bit number. What is the same for the whole
launch (arguments, and what is computed of them) is in other registers, and takes none of these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from .ssa import Function, Instruction, bits, lanes, split, typed

Pieces = tuple[frozenset[int], ...]
_NOTHING: frozenset[int] = frozenset()
# They give another name to what is in registers, or are part of the instruction that uses them.
_RENAMES = frozenset({"freeze", "fneg", "fpext", "ptrtoint", "inttoptr", "addrspacecast"})
PURE_CALL = re.compile(r"^llvm\.(?!memcpy|memset|memmove|lifetime|assume)")
_NO_CODE = re.compile(r"^llvm\.(?:lifetime|assume|dbg|experimental\.noalias)")
_INDEX = re.compile(r"^(?:i32|i64) (-?\d+)$")


class Values:
    """The values of a function as registers: `size` has the half registers of each piece."""

    def __init__(self, function: Function, is_shared: Callable[[Instruction], bool]) -> None:
        self.function = function
        self.size: list[int] = []
        self.instructions = {
            i.name: i for b in function.blocks.values() for i in b.instructions if i.name
        }
        self._is_shared = is_shared
        self._shared: dict[str, bool] = dict.fromkeys(function.parameters[:2], True)
        self._pieces: dict[str, Pieces] = {}
        for name in function.parameters[2:]:
            self._shared[name] = False
            self._pieces[name] = self._new("i32")
        # in the order of the text, in which each needs little but what is known
        for name in self.instructions:
            self.pieces(name)

    def is_shared(self, value: str) -> bool:
        """Whether it is known before the launch, and the same for all threads."""
        if not value.startswith("%"):
            return True
        if value not in self._shared:
            i = self.instructions.get(value)
            self._shared[value] = i is not None and self._computed_before(i)
        return self._shared[value]

    def _computed_before(self, i: Instruction) -> bool:
        if i.opcode in ("phi", "alloca", "atomicrmw", "cmpxchg"):
            return i.opcode == "alloca"
        if i.opcode == "load" or (i.opcode == "call" and not PURE_CALL.match(i.callee)):
            return self._is_shared(i) and all(map(self.is_shared, i.operands))
        return all(map(self.is_shared, i.operands))

    def _new(self, type: str) -> Pieces:
        """Registers for a value of this type."""
        pieces = []
        for part in _parts(type):
            width = bits(part) or 32
            for each in [1] if width <= 16 else [2] * -(-width // 32):
                pieces.append(frozenset([len(self.size)]))
                self.size.append(each)
        return tuple(pieces)

    def pieces(self, value: str) -> Pieces:
        """Where a value is; nothing for constants and what all threads share."""
        if self.is_shared(value):
            return ()
        if value not in self._pieces:
            i = self.instructions[value]
            self._pieces[value] = self._renamed(i) or self._new(i.type)
        return self._pieces[value]

    def _whole(self, value: str, type: str) -> Pieces:
        """The pieces of a value of `type`, constants too."""
        known = self.pieces(value)
        if known:
            return known
        count = sum(-(-(bits(part) or 32) // 32) for part in _parts(type))
        return (_NOTHING,) * count

    def _renamed(self, i: Instruction) -> Pieces:
        """What a value is where no instruction makes it; () where one does."""
        if i.opcode in _RENAMES:
            return self._whole(*reversed(typed(i.text.partition(" to ")[0])))
        if i.opcode == "bitcast":
            of, value = typed(i.text.partition(" to ")[0])
            same = [bits(t) for t in _parts(of)] == [bits(t) for t in _parts(i.type)]
            return self._whole(value, of) if same else ()
        if i.opcode in ("zext", "sext", "trunc", "lshr"):
            return self._part_of_number(i)
        if i.opcode in ("extractelement", "insertelement", "shufflevector"):
            return self._rearranged(i)
        if i.opcode == "getelementptr":
            base, *index = split(i.text)[1:]
            if all(_INDEX.match(part) for part in index):
                return self._whole(typed(base)[1], "ptr")
        return ()

    def _part_of_number(self, i: Instruction) -> Pieces:
        of, value = typed(split(i.text)[0].partition(" to ")[0])
        if i.opcode == "lshr":
            half = of == "i64" and split(i.text)[1] == "32"
            return (self._whole(value, of)[1], _NOTHING) if half else ()
        if (of, i.type, i.opcode) == ("i32", "i64", "zext"):
            return (*self._whole(value, of), _NOTHING)
        if (of, i.type, i.opcode) == ("i32", "i64", "sext"):
            return (*self._whole(value, of), *self._new("i32"))
        if (of, i.type) == ("i64", "i32"):
            return self._whole(value, of)[:1]
        return ()

    def _rearranged(self, i: Instruction) -> Pieces:
        parts = [typed(part) for part in split(i.text)]
        count, element = lanes(parts[0][0])
        each = max(1, -(-bits(element) // 32))
        whole = self._whole(parts[0][1], parts[0][0])
        if i.opcode == "shufflevector":
            both = whole + self._whole(parts[1][1], parts[1][0])
            out: list[frozenset[int]] = []
            for n in _taken(*parts[2]):
                out += both[n * each : (n + 1) * each] if n >= 0 else (_NOTHING,) * each
            return tuple(out)
        at = parts[-1][1]
        if not at.isdigit():
            return ()
        begin = int(at) * each
        if i.opcode == "extractelement":
            return whole[begin : begin + each]
        one = self._whole(parts[1][1], parts[1][0])
        return whole[:begin] + one + whole[begin + each : count * each]

    def address(self, value: str) -> Iterable[int]:
        """What a memory instruction needs for its address: a base, and an index of 32 bits."""
        i = self.instructions.get(value)
        if i is not None and i.opcode == "getelementptr" and not self.is_shared(value):
            base, *index = split(i.text)[1:]
            narrow = self._narrow(index[-1]) if len(index) == 1 else None
            of = typed(base)[1]
            if all(_INDEX.match(part) for part in index):
                yield from self.address(of)
                return
            if narrow is not None:
                yield from flat(self.pieces(of))
                yield from flat(self.pieces(narrow))
                return
        yield from flat(self.pieces(value))

    def _narrow(self, index: str) -> str | None:
        """The 32-bit number that an index is made from."""
        type, value = typed(index)
        if type == "i32":
            return value
        i = self.instructions.get(value)
        if i is None or i.opcode not in ("zext", "sext"):
            return None
        of, source = typed(i.text.partition(" to ")[0])
        return source if of == "i32" else None

    def uses(self, i: Instruction) -> frozenset[int]:
        """Pieces that an instruction reads. Those of a phi are read on the way to it."""
        if i.opcode == "phi" or (i.name and self.is_shared(i.name)):
            return _NOTHING
        if i.opcode == "load":
            return frozenset(self.address(i.operands[0])) if i.operands else _NOTHING
        if i.opcode == "store":
            parts = split(i.text)
            at = frozenset(self.address(typed(parts[1])[1]))
            return at | frozenset(flat(self.pieces(typed(parts[0])[1])))
        if i.opcode == "call" and _NO_CODE.match(i.callee):
            return _NOTHING
        if i.name and not self.defines(i):
            return _NOTHING
        return frozenset(p for v in i.operands for p in flat(self.pieces(v)))

    def defines(self, i: Instruction) -> frozenset[int]:
        """Pieces that an instruction writes."""
        if not i.name or self.is_shared(i.name):
            return _NOTHING
        own = frozenset(flat(self.pieces(i.name)))
        if i.opcode == "phi":
            return own
        return own - frozenset(p for v in i.operands for p in flat(self.pieces(v)))


def _parts(type: str) -> list[str]:
    """The scalars that a value of this type is made of."""
    if type.startswith("{"):
        return [p for member in split(type[1:-1].strip()) for p in _parts(member)]
    if type.startswith("["):
        length, _, element = type[1:-1].partition(" x ")
        return _parts(element) * int(length)
    count, element = lanes(type)
    return [element] * count


def flat(pieces: Pieces) -> Iterable[int]:
    for piece in pieces:
        yield from piece


def _taken(type: str, mask: str) -> list[int]:
    """The elements that a shuffle takes; -1 where any will do."""
    if not mask.startswith("<"):
        return [0 if mask == "zeroinitializer" else -1] * lanes(type)[0]
    numbers = [typed(part)[1] for part in split(mask[1:-1])]
    return [int(n) if n.isdigit() else -1 for n in numbers]
