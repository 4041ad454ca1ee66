# SPDX-License-Identifier: MIT
"""Ours or torch's? The only file that decides.

An op declares what it is decided by, `Values("silu")`, `Rows("softmax")` or `Matrices("qr")`. From
where on ours is ahead is a number of the machine: the policy files (`_policy.py`) have a row for
each dtype, and `metalcore tune` measures them. Without a row for a call, it is ours.

    [silu]
    float32 = { from = 8192, ratio = 1.05 }
    [qr]
    float32_tall_recorded = { up_to = [4, 8], from = [100, inf], ratio = [1.1, 0.7] }

`from` is the fewest values (or matrices) for ours; with `up_to`, for rows (or sides) up to that
length, the last one for all longer ones. `ratio` is torch's time by ours there.

In a compiled program the question is another one: our kernel, or one that the compiler makes of the
meaning, fused with what stands around it? `is_left_to_compiler` answers it.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from metalcore import _torch, _trace
from metalcore._check import FLOATS, LAPACK_TYPES, dtype_name, expect, refuse
from metalcore._lazy import Registry
from metalcore._policy import tables, when_changed
from metalcore._sharding import is_dtensor

Arguments = Callable[[Tensor], tuple[Any, ...]]
T = TypeVar("T")

_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled


# What a compiler fuses with the ops before and after; our kernels would stand between them.
_FUSED = (
    *("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "softmax", "soft_cap", "rope"),
    *("silu", "gelu", "bias_silu", "bias_gelu", "swiglu", "geglu"),
)
_FUSED_BY_COMPILERS = frozenset({*_FUSED, *(f"{op}_backward" for op in _FUSED)})


def is_left_to_compiler(op: str, args: Sequence[Any]) -> bool:
    """Whether a compiler is to make its own kernel of the meaning of `op`, which traces tell. On a
    GPU ours stays."""
    if op not in _FUSED_BY_COMPILERS or not _torch.is_taken_apart():
        return False
    if next(_trace.tensors(args)).device.type != "cpu":
        return False
    _trace.left_to_compiler.add(op)
    return True


class Kind(NamedTuple):
    """What a row of numbers is for: tensors of a dtype and a form, with a gradient or without."""

    dtype: torch.dtype
    form: str
    is_recorded: bool

    def __str__(self) -> str:
        parts = (dtype_name(self.dtype), self.form, "recorded" if self.is_recorded else "")
        return "_".join(filter(None, parts))


class Row(NamedTuple):
    """From where on ours is ahead, and torch's time by ours there, for each length of `up_to`."""

    up_to: list[int]
    starts: list[float]
    ratios: list[float]


# By kind, or by a plain tuple, which is faster to make: lengths, and from where on ours is ahead.
Numbers = dict[tuple[torch.dtype, str, bool], tuple[list[int], list[float]]]


class Route:
    """The choice of one op. `arguments` makes those of its public function from a tensor that it is
    decided by, for `metalcore tune`."""

    all: ClassVar[Registry["Route"]] = Registry()
    loaded: ClassVar[list["Route"]] = []
    dtypes: tuple[torch.dtype, ...] = FLOATS
    forms: tuple[str, ...] = ("",)
    least_rank = 0

    def __init__(
        self,
        op: str,
        case: str = "",
        arguments: Arguments = lambda x: (x,),
        *,
        torch_rounds: str = "",
    ) -> None:
        """`torch_rounds`: which sums of half types torch rounds as it goes, "gradients" or "all".
        Ours are kept in float32, and what is promised holds at every size."""
        self.op, self.name = op, f"{op}.{case}" if case else op
        self.arguments = arguments
        self.torch_rounds = torch_rounds
        self._rows: Numbers | None = None
        self._forced: bool | None = None
        Route.all.add(self.name, self)
        Route.loaded.append(self)

    def prefers_torch(self, x: Tensor, *others: Tensor | None) -> bool:
        """Whether a call with x and `others` is left to torch: it is ahead, and as exact."""
        if not self.is_behind(x, *others):
            return False
        if not self.torch_rounds or x.dtype.itemsize > 2 or self._forced:
            return True
        recorded = _is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (x, *others)
        )
        return self.torch_rounds == "gradients" and not recorded

    def is_behind(self, x: Tensor, *others: Tensor | None, least: int = 0) -> bool:
        """Whether torch is ahead for a call with x and `others`, all of one dtype: by the numbers,
        or because x has fewer than `least` values."""
        # first: a compiler would guard on all that is looked at, and vmap hides a batch
        if _is_compiling() or _torch.is_transformed() or not x.is_cpu:
            return False
        # torch has no rule for some, and the size of a part is not that of the whole
        if is_dtensor(x):
            return False
        if _trace.entered and _trace.wants_ops():
            return False
        if self._forced is not None:
            return self._forced
        if self._rows is None:
            rows = {kind: row for kind, (row, _) in self.sources().items()}
            # the last number is for all that is longer, too
            self._rows = {kind: (row.up_to[:-1], row.starts) for kind, row in rows.items()}
        if not self._rows:
            return False
        if 0 < x.numel() < least:
            return True
        dtype, needs_grad = x.dtype, x.requires_grad
        for t in others:
            if t is not None:
                if t.dtype is not dtype:
                    return False
                needs_grad = needs_grad or t.requires_grad
        form, length, count = self._features(x)
        row = self._rows.get((dtype, form, needs_grad and _is_grad_enabled()))
        return row is not None and 0 < count < row[1][bisect_left(row[0], length)]

    def by_torch(self, function: Callable[..., T], x: Tensor, *args: Any, **named: Any) -> T:
        """Call torch's `function`; traces show the path `torch`."""
        if _trace.entered:
            _trace.record_torch_path(self.op, x)
        return function(x, *args, **named)

    def kinds(self) -> list[Kind]:
        """All that there may be a row for."""
        recorded = (False, True)
        return [Kind(d, f, r) for d in self.dtypes for f in self.forms for r in recorded]

    def sources(self) -> dict[Kind, tuple[Row, str]]:
        """The rows, and for each its measurement and file."""
        known = {str(kind): kind for kind in self.kinds()}
        others = {"measured", "cpu", "metal", "mlx"}
        others |= {r.name.partition(".")[2] for r in Route.loaded if r.op == self.op}
        found = {}
        for file, table in tables(self.name):
            where, measured = f"{file} [{self.name}]", table.get("measured", "")
            for name, value in table.items():
                if name in known:
                    row = _row(self.op, f"{where} {name}", value)
                    found[known[name]] = (row, f"{measured} ({file})")
                elif name not in others:
                    refuse(self.op, f"{where} sets {name}, which is none of {', '.join(known)}")
        return found

    @contextmanager
    def forced(self, to_torch: bool) -> Iterator[None]:
        """Whatever the numbers say: all calls by torch, or all by ours."""
        before, self._forced = self._forced, to_torch
        try:
            yield
        finally:
            self._forced = before

    def forget(self) -> None:
        """Read the numbers again at the next call."""
        self._rows = None

    def _features(self, x: Tensor) -> tuple[str, int, int]:
        """The form of x, a length and a count."""
        raise NotImplementedError


class Values(Route):
    """Decided by the number of values."""

    def _features(self, x: Tensor) -> tuple[str, int, int]:
        return "", 0, x.numel()


class Rows(Route):
    """Decided by the length of rows [..., length] and the number of values."""

    least_rank = 1

    def _features(self, x: Tensor) -> tuple[str, int, int]:
        return "", x.size(-1), x.numel()


class Queries(Route):
    """Decided by the length of queries [..., length, D] and the number of their values."""

    least_rank = 3

    def _features(self, x: Tensor) -> tuple[str, int, int]:
        return "", x.size(-2), x.numel()


class Matrices(Route):
    """Decided by the longer side of matrices [..., M, N], whether it is at least twice the other
    one (tall), and their number. A single one (alone) may have an algorithm of its own."""

    dtypes = LAPACK_TYPES
    least_rank = 2

    def __init__(
        self, op: str, arguments: Arguments = lambda x: (x,), *, square: bool = False
    ) -> None:
        super().__init__(op, "", arguments)
        self.forms = ("", "alone") if square else ("", "alone", "tall", "tall_alone")

    def _features(self, x: Tensor) -> tuple[str, int, int]:
        m, n = x.size(-2), x.size(-1)
        count = x.numel() // (m * n) if m and n else 0
        if m < n:
            m, n = n, m
        if m < 2 * n or "tall" not in self.forms:
            return "alone" if count == 1 else "", m, count
        return "tall_alone" if count == 1 else "tall", m, count


class Systems(Route):
    """Decided by the rows of right sides [..., N, K], whether they are few (4 K <= N) or a single
    one (vector), and the number of systems."""

    dtypes = LAPACK_TYPES
    least_rank = 2
    forms = ("", "few", "vector")

    def _features(self, x: Tensor) -> tuple[str, int, int]:
        n, k = x.size(-2), x.size(-1)
        form = "vector" if k == 1 else "few" if 4 * k <= n else ""
        return form, n, x.numel() // (n * k) if n and k else 0


@when_changed
def _forget_all() -> None:
    for route in Route.loaded:
        route.forget()


def _row(op: str, where: str, value: Any) -> Row:
    """A row as a file has it: `{ from = 8192 }`, or lists with `up_to`."""
    expect(isinstance(value, dict) and "from" in value, op, f"{where} must have from, got {value}")
    up_to, starts, ratios = value.get("up_to", []), value["from"], value.get("ratio", [])
    if "up_to" not in value:
        starts, ratios = [starts], [ratios] if ratios else []
    is_right = isinstance(starts, list) and len(starts) == max(1, len(up_to))
    is_right = is_right and all(type(n) in (int, float) for n in (*up_to, *starts))
    expect(is_right, op, f"{where} must have a number in from for each of up_to, got {value}")
    return Row(up_to, starts, ratios)
