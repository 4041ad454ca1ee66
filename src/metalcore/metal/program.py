# SPDX-License-Identifier: MIT
"""Program: what a Metal op does for one kind of arguments, without any tensor.

A plan is given a `Program` to fill and the op's arguments as their schema names them: a `Buffer`
for a tensor, a `Number` for a float, and ints, bools and strings as they are. It returns the
buffers that the op returns. Nothing in it can depend on data, so a Program is made once per kind of
arguments and executed by torch.mps, by mslsim or by MLX.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from metalcore.metal import source
from metalcore.metal.buffer import Buffer as Buffer
from metalcore.metal.buffer import Number as Number
from metalcore.metal.buffer import strides
from metalcore.metal.text.signature import Parameter, Signature

SIMD_WIDTH = 32
MAX_THREADS_PER_GROUP = 1024
MAX_UINT = 2**32 - 1
MAX_BUFFERS = 31
MAX_THREADGROUP_BYTES = 32 * 1024

MSL_TYPE = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
_PLAIN: dict[Any, torch.dtype] = {
    **{name: dtype for dtype, name in MSL_TYPE.items()},
    "int": torch.int32,
    "long": torch.int64,
    "uchar": torch.uint8,
    "char": torch.int8,
    "bool": torch.bool,
}

Size = tuple[int, int, int]
Policy = dict[str, Any]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


Value = Buffer | Number | int | float | tuple[int, ...] | tuple[float, ...]


@dataclass(frozen=True)
class Launch:
    """A call of kernel `function` of `file`, for the template arguments `variant` (types by their
    Metal names, numbers, flags), over `threads` in groups of `group`.

    Raises ValueError on creation where Metal would refuse the call or misread an argument.
    """

    file: str
    function: str
    variant: source.Variant
    args: tuple[Value, ...]
    threads: Size
    group: Size

    @property
    def kernel(self) -> str:
        return source.kernel_name(self.file, self.function, self.variant)

    @property
    def signature(self) -> Signature:
        return source.signature(self.file, self.function)

    def __post_init__(self) -> None:
        declared, size = self.signature, prod(self.group)
        multiple = f"groups of a multiple of {SIMD_WIDTH} threads, because it uses collectives"
        memory = f"at most {MAX_THREADGROUP_BYTES} bytes of threadgroup memory"
        wanted, given = len(declared.parameters), len(self.args)
        if len(declared.template) != len(self.variant):
            names = ", ".join(t.name for t in declared.template)
            raise ValueError(
                f"{self.function}: the launch needs template arguments for <{names}>, "
                f"got {self.variant}"
            )
        template = source.arguments(self.variant)
        used = declared.threadgroup_bytes_for(template)
        limit = declared.max_threads_for(template) or MAX_THREADS_PER_GROUP
        most = f"1 to {limit} threads per group"
        self._require(min(self.threads) > 0, "a non-empty grid", self.threads)
        self._require(max(self.threads) <= MAX_UINT, "a grid that uint counts", self.threads)
        self._require(0 < size <= limit, most, self.group)
        self._require(not declared.has_collectives or size % SIMD_WIDTH == 0, multiple, self.group)
        self._require(given <= MAX_BUFFERS, f"at most {MAX_BUFFERS} buffers", given)
        self._require(used <= MAX_THREADGROUP_BYTES, memory, used)
        self._require(given == wanted, f"{wanted} arguments", given)
        for parameter, value in zip(declared.parameters, self.args, strict=True):
            kind = f"{parameter.type}{'' if parameter.is_scalar else '*'}"
            found = f"{value.dtype} tensor" if isinstance(value, Buffer) else repr(value)
            self._require(self._fits(parameter, value), f"{parameter.name} as {kind}", found)

    def _require(self, condition: bool, required: str, got: Any) -> None:
        if not condition:
            raise ValueError(f"{self.kernel}: the launch needs {required}, got {got}")

    def _fits(self, parameter: Parameter, value: Value) -> bool:
        """Whether torch passes `value` as the kernel declares it: int as long, float as float.

        A uint reads the low half of a long, which is all of a number that fits; torch's `arg_casts`
        would do the same by a dictionary in every call.
        """
        if isinstance(value, Number):
            return parameter.space == "constant" and parameter.type != "uint"
        expected = {"long": int, "float": float}.get(parameter.type)
        if parameter.is_scalar and parameter.type == "uint":
            return type(value) is int and 0 <= value <= MAX_UINT
        if parameter.is_scalar:
            return type(value) is expected
        if isinstance(value, tuple):
            return {type(v) for v in value} == {expected}
        if not isinstance(value, Buffer) or not value.is_contiguous:
            return False
        return value.dtype == self._dtype(parameter.type, value.dtype)

    def _dtype(self, declared: str, default: torch.dtype) -> torch.dtype:
        """Of the values behind a pointer: `float`, `T`, or chunks of them as `chunk.h` has them."""
        if declared.endswith("::wide"):
            return torch.float32
        names = [t.name for t in self.signature.template]
        given = dict(zip(names, self.variant, strict=True))
        words = [given.get(word, word) for word in re.findall(r"\w+", declared)]
        return next((_PLAIN[word] for word in words if word in _PLAIN), default)


@dataclass(frozen=True)
class Copy:
    """to = source, which may be of another dtype, or broadcast."""

    to: Buffer
    source: Buffer


@dataclass(frozen=True)
class Fill:
    to: Buffer
    value: float | Number


@dataclass(frozen=True)
class Matmul:
    """to = alpha * a @ b + beta * add, for batches [batch, M, K] and [batch, K, N]."""

    to: Buffer
    a: Buffer
    b: Buffer
    alpha: float
    beta: float
    add: Buffer


@dataclass(frozen=True)
class Gather:
    """to[i, j] = source[i, index[i, j]] along `dim`; index is of the shape of `to`."""

    to: Buffer
    source: Buffer
    dim: int
    index: Buffer


@dataclass(frozen=True)
class Sort:
    """values = source sorted along the last dimension, equal ones in their order, and `order` is
    where each of them was."""

    values: Buffer
    order: Buffer
    source: Buffer


Step = Launch | Copy | Fill | Matmul | Gather | Sort


class Arguments:
    """The arguments of an op, by the names of its schema."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the op has no argument {name}")


@dataclass(frozen=True)
class Derived:
    """A number that the host computes from arguments of each call: `function(*of)`."""

    number: Number
    function: Callable[..., Any]
    of: tuple[Any, ...]


@dataclass(frozen=True)
class Check:
    """`function(*of)` looks at what a run has written, and raises where it must."""

    function: Callable[..., None]
    of: tuple[Buffer, ...]


@dataclass
class Program:
    """Buffers to make and steps to do with them, in order. None of them waits for the GPU."""

    policy: Policy
    arguments: int
    has_lists: bool = False
    """Whether tensors of a list are arguments, each of them."""
    made: list[Buffer] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    derived: list[Derived] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    outputs: Any = None

    def __post_init__(self) -> None:
        self.slots = self.arguments

    def new(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Buffer:
        """A buffer that nobody has written yet."""
        shape = tuple(shape)
        buffer = Buffer(self._slot(), shape, dtype, strides(shape))
        self.made.append(buffer)
        return buffer

    def new_like(self, x: Buffer, dtype: torch.dtype | None = None) -> Buffer:
        return self.new(x.shape, dtype or x.dtype)

    def dense(self, x: Buffer, dtype: torch.dtype | None = None) -> Buffer:
        """`x` itself where it is contiguous and of that dtype, else a copy."""
        if x.is_contiguous and dtype in (None, x.dtype):
            return x
        return self.copy(self.new_like(x, dtype), x)

    def rounded(self, x: Buffer, dtype: torch.dtype) -> Buffer:
        """A result in the dtype that the caller wants."""
        return self.dense(x, dtype)

    def copy(self, to: Buffer, source: Buffer) -> Buffer:
        if to.numel:
            self.steps.append(Copy(to, source))
        return to

    def fill(self, to: Buffer, value: float | Number) -> Buffer:
        if to.numel:
            self.steps.append(Fill(to, value))
        return to

    def identity(self, x: Buffer) -> Buffer:
        self.fill(x, 0.0)
        self.fill(x.diagonal(), 1.0)
        return x

    def matmul(
        self,
        to: Buffer,
        a: Buffer,
        b: Buffer,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        add: Buffer | None = None,
    ) -> None:
        """to = alpha * a @ b + beta * add; `add` is `to` itself where it is not given."""
        if to.numel:
            self.steps.append(Matmul(to, a, b, alpha, beta, to if add is None else add))

    def gather(self, to: Buffer, source: Buffer, dim: int, index: Buffer) -> None:
        self.steps.append(Gather(to, source, dim, index))

    def sort(self, source: Buffer) -> tuple[Buffer, Buffer]:
        """The values in order along the last dimension, and where each of them was."""
        values, order = self.new_like(source), self.new_like(source, torch.int64)
        self.steps.append(Sort(values, order, source))
        return values, order

    def launch(
        self,
        file: str,
        function: str,
        variant: Sequence[str | int],
        args: Sequence[Value],
        threads: int | Size,
        group: int | Size,
    ) -> None:
        grid = (threads, 1, 1) if isinstance(threads, int) else threads
        each = (group, 1, 1) if isinstance(group, int) else group
        self.steps.append(Launch(file, function, tuple(variant), tuple(args), grid, each))

    def number(self, function: Callable[..., Any], *of: Any) -> Number:
        """What `function` gives for arguments of the call, when it is known: `of` are Numbers, or
        buffers that are in the memory of the host; a list counts as one argument."""
        self.derived.append(Derived(Number(self._slot()), function, of))
        return self.derived[-1].number

    def check(self, function: Callable[..., None], *of: Buffer) -> None:
        """After a run, the host looks at `of`: waits for the GPU, so only where an error is due."""
        self.checks.append(Check(function, of))

    @property
    def launches(self) -> Iterator[Launch]:
        return (step for step in self.steps if isinstance(step, Launch))

    @property
    def kernels(self) -> str:
        """The names of all kernels, as a trace shows them."""
        return " + ".join(dict.fromkeys(launch.kernel for launch in self.launches)) or "empty"

    def _slot(self) -> int:
        self.slots += 1
        return self.slots - 1
