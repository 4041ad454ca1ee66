# SPDX-License-Identifier: MIT
"""Programs executed on MLX arrays: launches by `mx.fast.metal_kernel`, the other steps by MLX.

A slot is a flat array. What a launch writes is a new array: all that stands behind its pointer.
Nothing here waits for a result.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from metalcore.metal.program import (
    Buffer,
    Copy,
    Fill,
    Gather,
    Launch,
    Matmul,
    Number,
    Program,
    Sort,
    Step,
)
from metalcore.mlx import _kernel
from metalcore.mlx._partial import keeps, together
from metalcore.mlx.exchange import mlx_dtype

Slots = list[Any]
Compiler = Callable[..., Any]


class Runner:
    """A Program on arrays: `runner(args)` gives the outputs, one for each buffer."""

    def __init__(self, program: Program, compiler: Compiler = _kernel.compiled) -> None:
        self.program, self.path = program, program.kernels
        self._compiler = compiler
        self._sizes = {b.slot: b.numel for b in program.made}
        self._dtypes = {b.slot: mlx_dtype(b.dtype) for b in program.made}
        self._constants: dict[Any, mx.array] = {}

    def __call__(self, args: Sequence[Any]) -> Any:
        slots, outputs = self.slots(args), self.program.outputs
        if isinstance(outputs, Buffer):
            return self._read(slots, outputs)
        return tuple(self._read(slots, o) for o in outputs)

    def slots(self, args: Sequence[Any]) -> Slots:
        """Everything after a run: the arguments first, each a flat array."""
        program = self.program
        slots: Slots = [a.reshape(-1) if isinstance(a, mx.array) else a for a in args]
        slots += [None] * (program.slots - len(slots))
        for number in program.derived:
            of = (_host(slots, o) for o in number.of)
            slots[number.number.slot] = number.function(*of)
        for step in program.steps:
            self._do(step, slots)
        return slots

    def _do(self, step: Step, slots: Slots) -> None:
        match step:
            case Launch():
                self._launch(step, slots)
            case Copy(to, of):
                value = mx.broadcast_to(self._read(slots, of), to.shape)
                self._write(slots, to, value.astype(mlx_dtype(to.dtype)))
            case Fill(to, value):
                number = slots[value.slot] if isinstance(value, Number) else value
                self._write(slots, to, mx.full(to.shape, number, mlx_dtype(to.dtype)))
            case Matmul(to, a, b, alpha, beta, add):
                product = self._read(slots, a) @ self._read(slots, b)
                product = product if alpha == 1 else product * alpha
                if beta != 0:
                    product = product + beta * self._read(slots, add)
                self._write(slots, to, product.astype(mlx_dtype(to.dtype)))
            case Gather(to, of, dim, index):
                at = self._read(slots, index)
                self._write(slots, to, mx.take_along_axis(self._read(slots, of), at, dim))
            case Sort(values, order, of):
                x = self._read(slots, of)
                at = mx.argsort(x, -1)
                self._write(slots, values, mx.take_along_axis(x, at, -1))
                self._write(slots, order, at.astype(mx.int64))

    def _launch(self, step: Launch, slots: Slots) -> None:
        parameters = step.signature.parameters
        pairs = list(zip(parameters, step.args, strict=True))
        written = [(p, a) for p, a in pairs if p.is_written and isinstance(a, Buffer)]
        inputs = [self._input(p.type, p.is_scalar, a, slots) for p, a in pairs if not p.is_written]
        kept = [keeps(step.function, p.name) and slots[a.slot] is not None for p, a in written]
        buffers = [a for _, a in written]
        launch = partial(
            self._compiler(step.file, step.function, step.variant),
            inputs=inputs,
            output_shapes=[(max(a.numel, 1),) for a in buffers],
            output_dtypes=[mlx_dtype(a.dtype) for a in buffers],
            grid=step.threads,
            threadgroup=step.group,
        )
        made = launch(init_value=0.0) if any(kept) else launch()
        again = launch(init_value=1.0) if any(kept) else made
        done = set()
        for a, new, other, is_kept in zip(buffers, made, again, kept, strict=True):
            # what is given for two parameters stands for nothing in the second
            place = (a.slot, a.offset)
            if place in done:
                continue
            done.add(place)
            value = new[: a.numel]
            if is_kept:
                value = together(value, other[: a.numel], self._read(slots, a).reshape(-1))
            self._write(slots, a, value)

    def _input(self, kind: str, is_scalar: bool, value: Any, slots: Slots) -> mx.array:
        if isinstance(value, Number):
            value = slots[value.slot]
        elif not isinstance(value, Buffer):
            known = (kind, value)
            if known not in self._constants:
                self._constants[known] = _numbers(kind, value)
            return self._constants[known]
        if not isinstance(value, Buffer):
            return _numbers(kind, value)
        memory = self._memory(slots, value.slot)
        if value.offset:
            memory = memory[value.offset :]
        missing = _kernel.LEAST - memory.size
        return mx.pad(memory, (0, missing)) if missing > 0 else memory

    def _memory(self, slots: Slots, slot: int) -> mx.array:
        """All of a slot; zeros stand for what nobody has written."""
        if slots[slot] is None:
            slots[slot] = mx.zeros((self._sizes[slot],), self._dtypes[slot])
        return slots[slot]

    def _read(self, slots: Slots, b: Buffer) -> mx.array:
        memory = self._memory(slots, b.slot)
        if b.is_contiguous:
            if b.numel != memory.size:
                memory = memory[b.offset : b.offset + b.numel]
            return memory.reshape(b.shape)
        return mx.as_strided(memory, b.shape, b.stride, b.offset)

    def _write(self, slots: Slots, b: Buffer, value: mx.array) -> None:
        if b.numel == self._size(slots, b.slot) and b.is_contiguous:
            slots[b.slot] = value.reshape(-1)
            return
        if b.numel == 0:
            return
        memory = self._memory(slots, b.slot)
        if b.is_contiguous:
            start = mx.array([b.offset], mx.int32)
            slots[b.slot] = mx.slice_update(memory, value.reshape(-1), start, axes=(0,))
        else:
            slots[b.slot] = mx.put_along_axis(memory, self._places(b), value.reshape(-1), 0)

    def _size(self, slots: Slots, slot: int) -> int:
        return self._sizes[slot] if slot in self._sizes else slots[slot].size

    def _places(self, b: Buffer) -> mx.array:
        """Where the values of a view stand in its slot."""
        what = (b.shape, b.stride, b.offset)
        if what not in self._constants:
            n = sum((size - 1) * step for size, step in zip(b.shape, b.stride, strict=True)) + 1
            all_of_it = mx.arange(b.offset, b.offset + n, dtype=mx.int32)
            self._constants[what] = mx.as_strided(all_of_it, b.shape, b.stride, 0).reshape(-1)
        return self._constants[what]


def _numbers(kind: str, value: Any) -> mx.array:
    """A number, or a table of them, which is no shorter than MLX's `device` arrays."""
    if isinstance(value, (tuple, list)):
        value = [*value, *([0] * (_kernel.LEAST - len(value)))]
    return mx.array(value, _kernel.SCALARS[kind])


def _host(slots: Slots, of: Any) -> Any:
    if isinstance(of, (tuple, list)):
        return [_host(slots, o) for o in of]
    return slots[of.slot]
