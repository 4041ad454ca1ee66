# SPDX-License-Identifier: MIT
"""What all threads of a launch share before they start, in the LLVM IR of a kernel."""

from __future__ import annotations

from .ssa import Function, Instruction, split, typed
from .text.kernels import Kernel

# Bytes of msl::Arguments and msl::Group (machine/abi.h).
POINTER = 8
_GROUP_POSITION = 12


class Shared:
    """Which loads and calls of a kernel give the same to all threads, before they start.

    These are the launch's arguments, what `constant` memory holds, and where threadgroup memory is;
    not the place of a threadgroup in the grid.
    """

    def __init__(self, kernel: Kernel, function: Function) -> None:
        self.arguments, self._group = function.parameters[:2]
        self._made = {i.name: i for b in function.blocks.values() for i in b.instructions if i.name}
        self._constant = {
            int(p.index) * POINTER
            for p in kernel.parameters
            if p.kind == "buffer" and p.index.isdigit() and "constant" in p.declared.split()
        }

    def __call__(self, i: Instruction) -> bool:
        if i.opcode == "call":
            return i.callee == "msl_threadgroup_memory"
        if not i.operands:
            return True
        root, offset = self.root(i.operands[0])
        if root == self.arguments:
            return True
        if root == self._group:
            return offset is None or offset >= _GROUP_POSITION
        made = self._made.get(root)
        if made is None or made.opcode != "load" or not made.operands:
            return False
        root, offset = self.root(made.operands[0])
        return root == self.arguments and offset in self._constant

    def root(self, address: str) -> tuple[str, int | None]:
        """What an address is computed from, and by how many bytes it is moved; None where that is
        no constant."""
        offset: int | None = 0
        while (i := self._made.get(address)) and i.opcode == "getelementptr":
            element, base, *index = split(i.text)
            by = typed(index[0])[1] if element == "i8" and len(index) == 1 else ""
            is_known = offset is not None and by.lstrip("-").isdigit()
            offset = (offset or 0) + int(by) if is_known else None
            address = typed(base)[1]
        return address, offset
