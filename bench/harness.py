# SPDX-License-Identifier: MIT
"""Bench: one benchmark, checked against the float64 truth before it is timed against its peers."""

import gc
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from metalcore import trace
from metalcore._accuracy import error, tolerance
from metalcore._measure import peak_bytes
from metalcore._op import Op

from .limits import Limits, synchronized

Function = Callable[..., Any]

# Seconds per case, all sides together, and the least number of rounds. A case whose minimum still
# falls gets up to three times as long: something else was running.
_BUDGET_SECONDS = 1.0
_MIN_ROUNDS = 8
# A side whose samples took so long in all is known well enough; the others go on.
_ENOUGH_SECONDS = 6.0
_SETTLED = 1.02
# A sample is repeated calls of at least this long, so that it does not show how cold the side
# before has left the caches. Its calls are timed in parts of at least so long, for the clock's
# resolution, of which the fastest counts: the mean of short calls is no match for one long call.
_SAMPLE_SECONDS = 1e-3
_PART_SECONDS = 5e-5


class Built:
    """A peer that has to be built for its inputs, or whose package may be missing.

    `build(*inputs)` imports and sets up, untimed, and returns the function of the inputs to time.
    `rounds_to` is the dtype whose rounding its result may show, where it is not that of the case.
    """

    def __init__(self, build: Function, rounds_to: torch.dtype | None = None) -> None:
        self.build, self.rounds_to = build, rounds_to


@dataclass(frozen=True)
class Bench:
    """What to run, on which inputs, against whom.

    Args:
        op: `<family>/<op>`, as the file is called.
        kind: what sets it apart from other benchmarks of the op.
        run: the metalcore function, or how to build it; returns a tensor or a sequence of tensors.
        peers: functions of the same inputs and results, by the name they are reported under.
        inputs: `inputs(**point, dtype=...)` for a point of the sweep; runs under the device to use.
        sweep: points; their values make the shape that is reported.
        dtypes: each is run at each point.
        truth: function of the inputs in float64; default the reference of the op.
        determined: what of the results is compared, where they are not unique; see
            `Op.determines`. For forward benchmarks.
        reduces_over: how many numbers the longest sum adds, from the inputs; sets the tolerance.
        bytes_moved: what must be read and written at least, from the inputs.
        flops: what must be computed, from the inputs.
        backward: also run the gradients of all inputs that are floating point.
        plot_over: the variable of the sweep that the page plots the ratio against.
        compiled_at: the point at which `--compile` compares with the peer `torch`, compiled.
        compiles: its sides are compiled, which takes minutes: only `--compile` runs it, in the end.
        memory: also measure the most memory that a call holds on top of what there was before.
    """

    op: str
    run: Function | Built
    peers: Mapping[str, Function | Built]
    inputs: Callable[..., Sequence[Tensor]]
    sweep: Sequence[Mapping[str, int]]
    dtypes: Sequence[torch.dtype]
    reduces_over: Callable[..., int]
    truth: Function | None = None
    determined: Callable[..., Sequence[Tensor]] = lambda *results: results
    bytes_moved: Callable[..., int] | None = None
    flops: Callable[..., int] | None = None
    backward: bool = False
    plot_over: str | None = None
    kind: str = ""
    compiled_at: Mapping[str, int] | None = None
    compiles: bool = False
    memory: bool = False

    @property
    def title(self) -> str:
        kind = ", ".join(filter(None, (self.kind, "forward+backward" * self.backward)))
        return f"{self.op} ({kind})" if kind else self.op

    @property
    def name(self) -> str:
        """The op's name in the library."""
        return self.op.rpartition("/")[2]


@dataclass(frozen=True)
class Case:
    bench: Bench
    point: Mapping[str, int]
    dtype: torch.dtype

    @property
    def shape(self) -> str:
        return "x".join(str(v) for v in self.point.values())


@dataclass
class Row:
    """One case against one peer. Where there is no time, the field says why in words."""

    op: str
    shape: str
    dtype: str
    backend: str
    variant: str
    ms: float | str
    peer: str | None
    peer_ms: float | str | None
    ratio: float | None
    gbps: float | None
    limit_fraction: float | None
    max_error: float | None
    gflops: float | None = None
    mib: float | None = None
    peer_mib: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields, with gflops and memory only where the benchmark measures them."""
        optional = ("gflops", "mib", "peer_mib")
        return {k: v for k, v in asdict(self).items() if v is not None or k not in optional}


@dataclass
class Side:
    """metalcore or one peer: the `call` to time, unless there is a `problem`, in words."""

    call: Callable[[], Any] | None = None
    problem: str = ""
    max_error: float = math.inf
    repeats: int = 1
    in_part: int = 1
    seconds: list[float] = field(default_factory=list)
    mib: float | None = None

    @property
    def ms(self) -> float | str:
        return self.problem or min(self.seconds) * 1e3


def cases(benches: Sequence[Bench]) -> list[Case]:
    return [Case(b, p, d) for b in benches for p in b.sweep for d in b.dtypes]


def nbytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def run_case(case: Case, device: str, limits: Limits) -> list[Row]:
    """Check and time one case: a row per peer, or one row where there is no peer."""
    bench = case.bench
    torch.manual_seed(0)
    with torch.device(device):
        inputs = list(bench.inputs(**case.point, dtype=case.dtype))
    truth, grads = _truth(case, inputs)
    side = _side(case, bench.run, inputs, grads, truth)
    peers = {n: _side(case, p, inputs, grads, truth) for n, p in bench.peers.items()}
    del truth
    backend, variant = _path(side)
    right = [s for s in (side, *peers.values()) if not s.problem]
    _time(right, device)
    for s in right if bench.memory else ():
        assert s.call is not None
        s.mib = peak_bytes(s.call, device) / 2**20

    bytes_moved = bench.bytes_moved(*inputs) if bench.bytes_moved else None
    flops = bench.flops(*inputs) if bench.flops else None
    ms = side.ms
    seconds = ms / 1e3 if isinstance(ms, float) else None
    rows = []
    compared: list[tuple[str | None, Side | None]] = [*peers.items()] or [(None, None)]
    for name, peer in compared:
        peer_ms = None if peer is None else peer.ms
        ratio = peer_ms / ms if isinstance(ms, float) and isinstance(peer_ms, float) else None
        rows.append(
            Row(
                op=bench.title,
                shape=case.shape,
                dtype=str(case.dtype).removeprefix("torch."),
                backend=backend,
                variant=variant,
                ms=ms,
                peer=name,
                peer_ms=peer_ms,
                ratio=ratio,
                gbps=bytes_moved / seconds / 1e9 if bytes_moved and seconds else None,
                limit_fraction=seconds and limits.fraction(seconds, case.dtype, bytes_moved, flops),
                max_error=side.max_error if math.isfinite(side.max_error) else None,
                gflops=flops / seconds / 1e9 if flops and seconds else None,
                mib=side.mib,
                peer_mib=peer and peer.mib,
            )
        )
    return rows


def _truth(case: Case, inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor] | None]:
    """Outputs and then gradients in float64 on the CPU, and the gradients drawn for the outputs.

    Where gradients are wanted, the inputs are marked as requiring them.
    """
    for x in inputs:
        x.requires_grad_(case.bench.backward and x.is_floating_point())
    exact = [_exact(x).requires_grad_(x.requires_grad) for x in inputs]
    meaning = case.bench.truth or Op.all[case.bench.name].meaning
    outputs = _as_list(meaning(*exact))
    if not case.bench.backward:
        return list(case.bench.determined(*outputs)), None
    # a backward pass starts at a loss with 1
    grads = [
        (torch.randn if y.dim() else torch.ones)(y.shape, dtype=case.dtype, device=inputs[0].device)
        for y in outputs
    ]
    wanted = [x for x in exact if x.requires_grad]
    return [
        *(y.detach() for y in outputs),
        *torch.autograd.grad(outputs, wanted, [_exact(g) for g in grads]),
    ], grads


def _exact(x: Tensor) -> Tensor:
    x = x.detach().cpu()
    return x.double() if x.is_floating_point() else x.clone()


def _call(
    function: Function, inputs: list[Tensor], grads: list[Tensor] | None
) -> Callable[[], list[Tensor]]:
    """The thing to time: the function on its inputs, with the gradients where they are wanted."""
    if grads is None:
        return lambda: _as_list(function(*inputs))
    wanted = [x for x in inputs if x.requires_grad]

    def both() -> list[Tensor]:
        outputs = _as_list(function(*inputs))
        return [*outputs, *torch.autograd.grad(outputs, wanted, grads)]

    return both


def _as_list(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def _side(
    case: Case,
    function: Function | Built,
    inputs: list[Tensor],
    grads: list[Tensor] | None,
    truth: list[Tensor],
) -> Side:
    """Check one side: its call if the results are right, else the reason."""
    bench, own = case.bench, function.rounds_to if isinstance(function, Built) else None
    allowed = tolerance(bench.name, own or case.dtype, bench.reduces_over(*inputs))
    try:
        built = function.build(*inputs) if isinstance(function, Built) else function
        call = _call(built, inputs, grads)
        results = call()
    except ModuleNotFoundError as missing:
        return Side(problem=f"not installed: {missing.name}")
    # A side that cannot do this case is a result to report, and the other sides go on.
    except (RuntimeError, ValueError, TypeError, AssertionError) as failure:
        return Side(problem=f"failed: {failure}")
    if grads is None:
        results = list(bench.determined(*results))
    found = max(error(a, b) for a, b in zip(results, truth, strict=True))
    if not found <= allowed:
        reason = f"skipped: wrong result (error {found:.1e}, allowed {allowed:.1e})"
        return Side(call=call, problem=reason, max_error=found)
    return Side(call=call, max_error=found)


def _path(side: Side) -> tuple[str, str]:
    """Paths and variants of one untimed call."""
    if side.call is None:
        return "", ""
    with trace() as t:
        side.call()
    paths = dict.fromkeys(r.path for r in t.records)
    variants = dict.fromkeys(r.variant for r in t.records if r.variant)
    return ", ".join(paths), ", ".join(variants)


def _time(sides: list[Side], device: str) -> None:
    """Fill in the seconds of each side: samples in turn, in another order in each round."""
    order = random.Random(0)
    with _no_garbage_collection():
        for side in sides:
            while (seconds := _sample(side, device)) * side.repeats < _SAMPLE_SECONDS:
                side.repeats = side.in_part = math.ceil(1.2 * _SAMPLE_SECONDS / seconds)
            if device == "cpu":  # elsewhere to wait for each part takes longer than most calls
                side.in_part = min(side.repeats, math.ceil(_PART_SECONDS / seconds))
        start, spent, rounds = synchronized(device), 0.0, 0
        while sides and (
            rounds < _MIN_ROUNDS
            or spent < _BUDGET_SECONDS
            or (spent < 3 * _BUDGET_SECONDS and not all(map(_settled, sides)))
        ):
            for side in order.sample(sides, len(sides)):
                if sum(side.seconds) < _ENOUGH_SECONDS:
                    side.seconds.append(_sample(side, device))
            rounds += 1
            spent = synchronized(device) - start


def _settled(side: Side) -> bool:
    """Whether the later half of the samples brought nothing new."""
    earlier = side.seconds[: len(side.seconds) // 2] or side.seconds
    return min(earlier) <= _SETTLED * min(side.seconds)


def _sample(side: Side, device: str) -> float:
    assert side.call is not None
    # Short calls are made twice as often, the first half untimed: until then threads of the side
    # before may be awake, and those of this side asleep.
    for _ in range(side.repeats if side.repeats > 1 else 0):
        side.call()
    fastest = math.inf
    for _ in range(side.repeats // side.in_part):
        start = synchronized(device)
        for _ in range(side.in_part):
            side.call()
        fastest = min(fastest, synchronized(device) - start)
    return fastest / side.in_part


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
