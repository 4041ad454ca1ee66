# SPDX-License-Identifier: MIT
"""trace(): which path computed each op."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metalcore import _native, _torch


class Record(NamedTuple):
    """One call of one op. `seconds` is wall time, on a GPU including the wait for its result."""

    op: str
    device: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    variant: str
    seconds: float


_last = threading.local()
entered: list[Any] = []
"""The traces and simulations that were entered, on any thread."""

left_to_compiler: set[str] = set()
"""The ops that compilers made kernels of their own for, in this process. These run unseen."""


def tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of an op, also those in lists."""
    for a in args:
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from tensors(a)


def note(path: str, variant: str = "") -> None:
    """Called by whatever computes an op, to say how."""
    _last.how = (path, variant)


class WatchingMode(_torch.DispatchMode):  # type: ignore[misc]
    """A mode that wants to see every op, also those that torch could compute."""

    def __enter__(self) -> Any:
        entered.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        entered.remove(self)


def are_composed(types: Iterable[type]) -> bool:
    """Whether a call is of tensors that consist of others, whose own calls a mode is to see."""
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


class trace(WatchingMode):  # noqa: N801  (reads as a function at the call)
    """Record every metalcore op that runs inside the block, on any thread of autograd.

    Example:
        >>> with metalcore.trace() as t:
        ...     y = metalcore.rms_norm(x, weight)
        >>> t.records[0].path
        'cpu:avx2'
        >>> print(t)  # every call; t.summary() adds them up
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Record] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if are_composed(types):
            return NotImplemented
        if func.namespace == "metalcore":
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if func.namespace != "metalcore_kernels":
            return func(*args, **(kwargs or {}))
        return self.measure(func, args, lambda: func(*args, **(kwargs or {})))

    def measure(self, func: Any, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        """Run `call`, which computes `func`, and add its record."""
        x = next(tensors(args))
        _last.how = None
        start = _now(x.device)
        output = call()
        seconds = _now(x.device) - start
        path, variant = _last.how or (f"cpu:{_native.isa}", _native.last_variant())
        self.add(func.__name__.split(".")[0], x, path, variant, seconds)
        return output

    def add(self, op: str, x: Tensor, path: str, variant: str, seconds: float) -> None:
        self.records.append(
            Record(
                op=op,
                device=x.device.type,
                dtype=str(x.dtype).removeprefix("torch."),
                shape=tuple(x.shape),
                path=path,
                variant=variant,
                seconds=seconds,
            )
        )

    @property
    def paths(self) -> dict[str, set[str]]:
        """The paths each op took."""
        found: dict[str, set[str]] = {}
        for record in self.records:
            found.setdefault(record.op, set()).add(record.path)
        return found

    def summary(self) -> str:
        """Calls and time by op and path, the longest first: what a model's layers ran on."""
        calls: Counter[tuple[str, ...]] = Counter()
        seconds: dict[tuple[str, ...], float] = {}
        for r in self.records:
            key = (r.op, r.device, r.dtype, r.path, r.variant)
            calls[key] += 1
            if not math.isnan(r.seconds):
                seconds[key] = seconds.get(key, 0.0) + r.seconds
        rows = []
        for what in sorted(calls, key=lambda k: -seconds.get(k, 0.0)):
            ms = f"{seconds[what] * 1e3:.3f}" if what in seconds else "not timed"
            rows.append((*what, str(calls[what]), ms))
        return _table(("op", "device", "dtype", "path", "variant", "calls", "ms"), rows)

    def __str__(self) -> str:
        rows = []
        for r in self.records:
            shape, ms = "x".join(map(str, r.shape)), f"{r.seconds * 1e3:.3f}"
            rows.append((r.op, r.device, r.dtype, shape, r.path, r.variant, ms))
        return _table(("op", "device", "dtype", "shape", "path", "variant", "ms"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    # on use: they take longer to load than an op
    from rich.console import Console
    from rich.table import Table

    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    if left_to_compiler:
        names = ", ".join(sorted(left_to_compiler))
        table.caption = f"in compiled graphs of this process, the compiler computes {names}"
        table.caption_justify = "left"
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def wants_ops() -> bool:
    """Whether a mode other than a trace is active, such as a simulation: it is to see every op."""
    return not all(isinstance(mode, trace) for mode in _torch.dispatch_modes())


def is_simulated() -> bool:
    """Whether Metal kernels are simulated."""
    modes = _torch.dispatch_modes()
    return any(isinstance(m, WatchingMode) and not isinstance(m, trace) for m in modes)


def record_torch_path(op: str, x: Tensor) -> None:
    """Tell the traces that torch is about to compute `op`; its time is not measured."""
    for mode in _torch.dispatch_modes():
        if isinstance(mode, trace):
            mode.add(op, x, "torch", "", float("nan"))


def _now(device: torch.device) -> float:
    if device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()
