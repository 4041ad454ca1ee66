# SPDX-License-Identifier: MIT
"""Launch: one kernel call as a value. Plans make them, `run` executes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from metalcore import _trace
from metalcore._op import Op
from metalcore._op import library as op_library
from metalcore._policy import policy
from metalcore.metal import source
from mslsim.signature import Parameter

SIMD_WIDTH = 32
MAX_THREADS_PER_GROUP = 1024
MAX_BUFFERS = 31
MAX_THREADGROUP_BYTES = 32 * 1024

MSL_TYPE = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}

Size = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
    """A call of kernel `<function>_<variant>` of `file` over `threads`, in groups of `group`.

    Raises ValueError on creation where Metal would refuse the call or misread an argument.
    """

    file: str
    function: str
    variant: str
    args: tuple[Any, ...]
    threads: Size
    group: Size

    @property
    def kernel(self) -> str:
        return f"{self.function}_{self.variant}"

    def __post_init__(self) -> None:
        declared = source.signature(self.file, self.function)
        size = prod(self.group)
        self._require(min(self.threads) > 0, "a non-empty grid", f"{self.threads}")
        self._require(
            0 < size <= MAX_THREADS_PER_GROUP,
            f"1 to {MAX_THREADS_PER_GROUP} threads per group",
            f"{self.group}",
        )
        self._require(
            not declared.has_collectives or size % SIMD_WIDTH == 0,
            f"groups of a multiple of {SIMD_WIDTH} threads, because it uses collectives",
            f"{self.group}",
        )
        self._require(
            len(self.args) <= MAX_BUFFERS, f"at most {MAX_BUFFERS} buffers", f"{len(self.args)}"
        )
        self._require(
            declared.threadgroup_bytes <= MAX_THREADGROUP_BYTES,
            f"at most {MAX_THREADGROUP_BYTES} bytes of threadgroup memory",
            f"{declared.threadgroup_bytes}",
        )
        self._require(
            len(self.args) == len(declared.parameters),
            f"{len(declared.parameters)} arguments",
            f"{len(self.args)}",
        )
        for parameter, value in zip(declared.parameters, self.args, strict=True):
            self._require(
                _fits(parameter, value),
                f"{parameter.name} as {parameter.type}{'' if parameter.is_scalar else '*'}",
                f"{value.dtype} tensor" if isinstance(value, Tensor) else repr(value),
            )

    def _require(self, condition: bool, required: str, got: str) -> None:
        if not condition:
            raise ValueError(f"{self.kernel}: the launch needs {required}, got {got}")


def _fits(parameter: Parameter, value: Any) -> bool:
    """Whether torch passes `value` as the kernel declares it: int as long, float as float."""
    if parameter.is_scalar:
        return type(value) is {"long": int, "float": float}.get(parameter.type)
    if isinstance(value, tuple):
        return {type(v) for v in value} == {{"long": int, "float": float}.get(parameter.type)}
    if not isinstance(value, Tensor) or not value.is_contiguous():
        return False
    plain = {"float": torch.float32, "int": torch.int32, "long": torch.int64}
    return value.dtype == plain.get(parameter.type, value.dtype)


@dataclass(frozen=True)
class Call:
    """A step of torch's own between launches: a matrix product or a copy, in place on views."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)


Step = Launch | Call
Planned = tuple[Sequence[Step], Any]
Plan = Callable[..., Planned | None]

PLANS: dict[str, Plan] = {}
"""The plan of each op that has Metal kernels."""


def metal_kernel(op: str) -> Callable[[Plan], Plan]:
    """Register `plan(policy, *op_arguments) -> (steps, outputs)` as the MPS kernel of `op`.

    A plan is a pure function of shapes and policy. It returns None for what it does not take.
    Its steps run in order, and none of them may wait for the GPU.
    """

    def register(plan: Plan) -> Plan:
        PLANS[op] = plan
        op_library.impl(op, lambda *args: _on_gpu(op, args), "MPS")
        return plan

    return register


def execute(op: str, args: Sequence[Any], backend: str, compiler: source.Compiler | None) -> Any:
    """Plan and run `op`; NotImplemented where its plan declines."""
    plan = PLANS[op]
    planned = plan(policy(plan.__module__.rpartition(".")[2], "metal"), *args)
    if planned is None:
        return NotImplemented
    steps, outputs = planned
    for step in steps:
        run(step, compiler)
    launches = [step for step in steps if isinstance(step, Launch)]
    kernels = " + ".join(dict.fromkeys(launch.kernel for launch in launches)) or "empty"
    _trace.note(f"{backend}:{kernels}", kernels)
    return outputs


def run(step: Step, compiler: source.Compiler | None = None) -> None:
    """Execute a step on torch's current MPS stream, or with another compiler's kernels."""
    if isinstance(step, Call):
        step.function(*step.args, **step.options)
        return
    kernel = getattr(source.library(step.file, compiler), step.kernel)
    kernel(*step.args, threads=step.threads, group_size=step.group)


def _on_gpu(op: str, args: tuple[Any, ...]) -> Any:
    outputs = execute(op, args, "metal", None)
    return Op.all[op].run_reference(*args) if outputs is NotImplemented else outputs


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
