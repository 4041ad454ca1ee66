# SPDX-License-Identifier: MIT
"""How our ops are computed on MLX arrays: by Metal kernels, or by what they mean in MLX's ops."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import torch
from torch import Tensor

from metalcore import _torch, _trace
from metalcore._autograd import as_tuple
from metalcore._op import Op
from metalcore.metal.plans import PLANS, Spec, flat
from metalcore.metal.run import METAL
from metalcore.mlx import _aten, _kernel
from metalcore.mlx._graph import trace
from metalcore.mlx._run import Compiler, Runner
from metalcore.mlx.exchange import torch_dtype


class ByMetal:
    """Kernels of programs, compiled by MLX, or by what stands in for it."""

    def __init__(self, name: str, compiler: Compiler) -> None:
        self._name, self._compiler = name, compiler
        self._runners: dict[Any, Runner | None] = {}

    def __call__(self, op: str, args: Sequence[Any], made: Any) -> Any:
        runner = self._runner(op, args) if op in PLANS else None
        if runner is None:
            return by_meaning(op, args, made)
        note(op, args, f"{self._name}:{runner.path}", runner.path)
        return runner(flat(args))

    def updated(self, op: str, args: Sequence[Any]) -> list[mx.array] | None:
        """The arguments as an op leaves them that writes to them; None where it has no program."""
        runner = self._runner(op, args)
        if runner is None:
            return None
        note(op, args, f"{self._name}:{runner.path}", runner.path)
        given = flat(args)
        slots = runner.slots(given)
        return [slots[i].reshape(a.shape) for i, a in enumerate(given) if isinstance(a, mx.array)]

    def _runner(self, op: str, args: Sequence[Any]) -> Runner | None:
        planned = PLANS[op]
        specs = [_spec(a) for a in args]
        known = [
            None if k == "number" else s for s, (_, k) in zip(specs, planned.kinds, strict=True)
        ]
        key = (op, *(tuple(k) if isinstance(k, list) else k for k in known))
        if key not in self._runners:
            program = planned.program(specs, METAL.gpu_cores)
            self._runners[key] = None if program is None else Runner(program, self._compiler)
        return self._runners[key]


def by_meaning(op: str, args: Sequence[Any], made: Any) -> Any:
    """The op by its reference in MLX's ops."""
    arrays = [a for a in flat(args) if isinstance(a, mx.array)]
    key = tuple(tuple(map(_spec, a)) if isinstance(a, list) else _spec(a) for a in args)
    note(op, args, "mlx", "")
    outputs = _aten.run(_meaning(op, key), arrays, by_meaning)
    return outputs[0] if isinstance(made, Tensor) else tuple(outputs)


by_meaning.are_meanings = True  # type: ignore[attr-defined]


@cache
def _meaning(op: str, key: tuple[Any, ...]) -> torch.fx.GraphModule:
    specs = [s for s in flat(key) if isinstance(s, Spec)]

    def meaning(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)

        def value(a: Any) -> Any:
            if isinstance(a, Spec):
                return next(given)
            return [value(b) for b in a] if type(a) is tuple else a

        return as_tuple(Op.all[op].meaning(*map(value, key)))

    return trace(meaning, specs)


def _spec(a: Any) -> Any:
    if isinstance(a, mx.array):
        return Spec.contiguous(a.shape, torch_dtype(a.dtype))
    return [_spec(b) for b in a] if isinstance(a, (list, tuple)) and not isinstance(a, Spec) else a


def note(op: str, args: Sequence[Any], path: str, variant: str) -> None:
    """Tell the traces. Nothing is computed yet, so no time is known."""
    if not _trace.entered:
        return
    x = next(a for a in flat(args) if isinstance(a, mx.array))
    for mode in _torch.dispatch_modes():
        if isinstance(mode, _trace.trace):
            dtype = str(x.dtype).removeprefix("mlx.core.")
            mode.records.append(
                _trace.Record(op, "mlx", dtype, tuple(x.shape), path, variant, float("nan"))
            )


METAL_WAY = ByMetal("metal", _kernel.compiled)
