# SPDX-License-Identifier: MIT
"""How many registers of a GPU thread are in use at once in a function of LLVM IR."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

from .ssa import Instruction, split, typed
from .values import PURE_CALL, Values, flat

# Half registers that the steps of a 64-bit division take, by Mesa's compiler.
DIVISION_SCRATCH = 36
_SIDE_EFFECTS = frozenset({"store", "call", "atomicrmw", "cmpxchg", "fence"})


class Step(NamedTuple):
    """An instruction, the pieces that it reads, and those that it writes."""

    reads: frozenset[int]
    writes: frozenset[int]
    instruction: Instruction


class Liveness:
    """The steps of each block, without phis, and the pieces that are alive at its end."""

    def __init__(self, values: Values) -> None:
        self.values = values
        blocks = values.function.blocks
        self.steps: dict[str, list[Step]] = {}
        self.out: dict[str, set[int]] = {name: set() for name in blocks}
        read: dict[str, set[int]] = {}
        written: dict[str, set[int]] = {}
        for name, block in blocks.items():
            phis = [i for i in block.instructions if i.opcode == "phi"]
            rest = block.instructions[len(phis) :]
            self.steps[name] = [Step(values.uses(i), values.defines(i), i) for i in rest]
            read[name], written[name] = set(), set()
            for step in reversed(self.steps[name]):
                read[name] = (read[name] - step.writes) | step.reads
                written[name] |= step.writes
            made = set[int]().union(*(values.defines(i) for i in phis))
            read[name] -= made
            written[name] |= made
            for value, source in (s for i in phis for s in i.sources):
                self.out[source].update(flat(values.pieces(value)))
        begin = {name: read[name] | (self.out[name] - written[name]) for name in blocks}
        changed = True
        while changed:
            changed = False
            for name in reversed(blocks):
                out, known = self.out[name], len(self.out[name])
                out.update(*(begin[successor] for successor in blocks[name].successors))
                if len(out) != known:
                    changed = True
                    begin[name] |= out - written[name]

    def peak(self, name: str, steps: list[Step]) -> int:
        """Most half registers in use at once in a block, for its steps in some order."""
        size = self.values.size
        alive = set(self.out[name])
        now = most = sum(size[p] for p in alive)
        for step in reversed(steps):
            now -= sum(size[p] for p in step.writes & alive)
            alive -= step.writes
            now += sum(size[p] for p in step.reads - alive)
            alive |= step.reads
            most = max(most, now + _scratch(step.instruction))
        return most


def peaks(live: Liveness) -> tuple[int, int]:
    """Most half registers in use at once: where instructions are in an order that needs few, and
    where loads come as early as they can."""
    few = early = 0
    for name, steps in live.steps.items():
        plain = live.peak(name, steps)
        if plain > few:
            few = max(few, min(plain, live.peak(name, _saving(live, name))))
        early = max(early, plain, live.peak(name, _loads_first(steps)))
    return few, early


def _scratch(i: Instruction) -> int:
    """Registers that an instruction needs only while it runs: one of many steps on the GPU."""
    return DIVISION_SCRATCH if is_long_division(i) else 0


def is_long_division(i: Instruction) -> bool:
    """Whether it divides 64-bit numbers, by one that is no constant."""
    if i.opcode not in ("sdiv", "udiv", "srem", "urem"):
        return False
    first, divisor = split(i.text)
    return typed(first)[0] == "i64" and divisor.startswith("%")


def _order(steps: list[Step]) -> list[set[int]]:
    """For each step the steps that must come before it."""
    maker = {p: k for k, step in enumerate(steps) for p in step.writes}
    before: list[set[int]] = [set() for _ in steps]
    effect, loads = -1, list[int]()
    for k, (reads, _, i) in enumerate(steps):
        before[k] = {maker[p] for p in reads if p in maker} - {k}
        writes_memory = i.opcode in _SIDE_EFFECTS and not PURE_CALL.match(i.callee)
        if writes_memory:
            before[k].update(loads)
        if effect >= 0 and (writes_memory or i.opcode == "load"):
            before[k].add(effect)
        if writes_memory:
            effect, loads = k, []
        elif i.opcode == "load":
            loads.append(k)
    before[-1].update(range(len(steps) - 1))
    return before


def _saving(live: Liveness, name: str) -> list[Step]:
    """The steps in an order that needs few registers, found from the end: next is always the step
    before which least is alive."""
    steps, size = live.steps[name], live.values.size
    before = _order(steps)
    users: dict[int, list[int]] = {}
    waiting = [0] * len(steps)
    for k, step in enumerate(steps):
        for p in step.reads:
            users.setdefault(p, []).append(k)
        for j in before[k]:
            waiting[j] += 1
    alive = set(live.out[name])
    cost = dict[int, int]()
    heap: list[tuple[int, int]] = []

    def is_ready(k: int) -> None:
        cost[k] = sum(size[p] for p in steps[k].reads - alive)
        cost[k] -= sum(size[p] for p in steps[k].writes & alive)
        heappush(heap, (cost[k], -k))

    is_ready(len(steps) - 1)
    order: list[Step] = []
    while heap:
        known, k = heappop(heap)
        if cost.get(-k) != known:
            continue
        del cost[-k]
        order.append(steps[-k])
        alive -= steps[-k].writes
        for p in steps[-k].reads - alive:
            for user in users[p]:
                if user in cost:
                    cost[user] -= size[p]
                    heappush(heap, (cost[user], -user))
        alive |= steps[-k].reads
        for j in before[-k]:
            waiting[j] -= 1
            if not waiting[j]:
                is_ready(j)
    return order[::-1]


def _loads_first(steps: list[Step]) -> list[Step]:
    """The steps with loads, and what their addresses need, as early as they can be."""
    before, last = _order(steps), len(steps) - 1
    users: list[list[int]] = [[] for _ in steps]
    for k, needed in enumerate(before):
        for j in needed:
            users[j].append(k)
    later = [True] * len(steps)
    for k in reversed(range(len(steps))):
        wanted = [later[u] for u in users[k] if u != last]
        later[k] = steps[k].instruction.opcode != "load" and (not wanted or any(wanted))
    waiting = [len(needed) for needed in before]
    heap = [(later[k], k) for k in range(len(steps)) if not waiting[k]]
    heapify(heap)
    order = []
    while heap:
        _, k = heappop(heap)
        order.append(steps[k])
        for u in users[k]:
            waiting[u] -= 1
            if not waiting[u]:
                heappush(heap, (later[u], u))
    return order
