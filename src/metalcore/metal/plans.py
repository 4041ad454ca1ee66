# SPDX-License-Identifier: MIT
"""The plans of all Metal ops, and the programs they made, by the kind of arguments.

A key holds what a plan may look at and nothing else: shapes, dtypes, layouts, ints, bools and
strings. Floats are not part of it, but for those that a plan asks for.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metalcore._op import Op
from metalcore._policy import policy
from metalcore.metal.buffer import Buffer, Number, strides
from metalcore.metal.program import MSL_TYPE, Arguments, Program

Plan = Callable[[Program, Arguments], Any]


class Spec(NamedTuple):
    """What a plan may know of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    is_aligned: bool = True

    @classmethod
    def of(cls, t: Tensor) -> "Spec":
        shape = tuple(t.shape)
        # strides of dimensions of one value may be anything, and a key does not hold them
        stride = strides(shape) if t.is_contiguous() else t.stride()
        return cls(shape, t.dtype, stride, t.storage_offset() % 4 == 0)

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> "Spec":
        return cls(tuple(shape), dtype, strides(tuple(shape)))


class Planned:
    """The plan of an op. Ints named `passed` go on to kernels as floats do; floats named `keyed`
    are known to the plan as ints are."""

    def __init__(
        self, op: str, plan: Plan, passed: Collection[str], keyed: Collection[str]
    ) -> None:
        self.op, self.plan, self._passed, self._keyed = op, plan, passed, keyed

    @cached_property
    def kinds(self) -> list[tuple[str, str]]:
        """Name and kind of each argument: tensor, tensors, number or fact."""
        return [(a.name, self._kind(a.name, str(a.type))) for a in Op.all[self.op].arguments]

    def _kind(self, name: str, type: str) -> str:
        if "Tensor" in type:
            return "tensors" if type.startswith("List") else "tensor"
        is_float = type == "float" and name not in self._keyed
        return "number" if is_float or name in self._passed else "fact"

    @cached_property
    def _places(self) -> tuple[list[int], list[int], list[int]]:
        """Of single tensors, of lists of them, and of facts."""
        kinds = ("tensor", "tensors", "fact")
        first, second, third = (
            [i for i, (_, kind) in enumerate(self.kinds) if kind == wanted] for wanted in kinds
        )
        return first, second, third

    def key(self, args: Sequence[Any]) -> tuple[Any, ...]:
        tensors, lists, facts = self._places
        key = [args[i] for i in facts]
        for i in tensors:
            t = args[i]
            if t is None:
                key.append(None)
            else:
                key += (t.shape, t.dtype, t.is_contiguous() or t.stride(), t.storage_offset() & 3)
        for i in lists:
            key.append(len(args[i]))
            for t in args[i]:
                key += (t.shape, t.dtype, t.is_contiguous() or t.stride(), t.storage_offset() & 3)
        return tuple(key)

    def program(self, args: Sequence[Any], gpu_cores: int | None = None) -> Program | None:
        """Plan for these arguments, tensors or Specs of them, on a GPU of so many cores; None where
        the plan declines."""
        op = self.plan.__module__.rpartition(".")[2]
        cores = gpu_cores or policy("gpu", "metal")["cores"]
        p = Program(
            {**policy(op, "metal"), "gpu_cores": cores},
            len(flat(args)),
            has_lists=bool(self._places[1]),
        )
        slots = iter(range(p.arguments))
        values: dict[str, Any] = {}
        for (name, kind), a in zip(self.kinds, args, strict=True):
            if kind == "tensors":
                values[name] = [_buffer(next(slots), t) for t in a]
            else:
                slot = next(slots)
                is_tensor = kind == "tensor" and a is not None
                number = Number(slot) if kind == "number" else a
                values[name] = _buffer(slot, a) if is_tensor else number
        dtypes = [b.dtype for b in _flat(values.values()) if isinstance(b, Buffer)]
        # of bytes and indices alone, the plan has to tell
        first = next((d for d in dtypes if d.is_floating_point), None)
        if not dtypes or (first is not None and first not in MSL_TYPE):
            return None
        p.outputs = self.plan(p, Arguments(values))
        return None if p.outputs is NotImplemented else p


class Plans(Mapping[str, Planned]):
    """The plan of each op that has Metal kernels; its module is loaded when it is looked for."""

    def __init__(self) -> None:
        self._known: dict[str, Planned | None] = {}

    def add(self, planned: Planned) -> None:
        self._known[planned.op] = planned

    def __getitem__(self, op: str) -> Planned:
        if op not in self._known:
            family, name = Op.all[op].story.split("/")
            if Path(__file__).parent.joinpath(family, f"{name}.py").exists():
                import_module(f"metalcore.metal.{family}.{name}")
            self._known.setdefault(op, None)
        planned = self._known[op]
        if planned is None:
            raise KeyError(op)
        return planned

    def __iter__(self) -> Iterator[str]:
        return (op for op in Op.all if op in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


PLANS = Plans()


def flat(args: Sequence[Any]) -> list[Any]:
    """The arguments with lists in place of which their tensors stand: one slot each."""
    return list(_flat(args))


def _flat(args: Iterable[Any]) -> Iterator[Any]:
    for a in args:
        if isinstance(a, list) or type(a) is tuple:
            yield from a
        else:
            yield a


def _buffer(slot: int, t: Tensor | Spec) -> Buffer:
    spec = t if isinstance(t, Spec) else Spec.of(t)
    return Buffer(slot, spec.shape, spec.dtype, spec.stride, slot_is_aligned=spec.is_aligned)


def metal_kernel(
    op: str, *, passed: Collection[str] = (), keyed: Collection[str] = ()
) -> Callable[[Plan], Plan]:
    """Register `plan(program, arguments) -> outputs` as the Metal side of `op`.

    It is asked for the dtypes that Metal has, of the op's first tensor of numbers; it returns
    NotImplemented for what else it does not take.
    """

    def register(plan: Plan) -> Plan:
        PLANS.add(Planned(op, plan, passed, keyed))
        return plan

    return register


def examples() -> Iterator[Program]:
    """What the examples of all ops do, in each dtype."""
    for op, dtype in product(PLANS, MSL_TYPE):
        for sample in Op.all[op].samples:
            program = PLANS[op].program(sample(dtype).args)
            assert program is not None
            yield program
