# SPDX-License-Identifier: MIT
"""`metalcore bench --sim --peers`: our Metal kernels beside MLX's and torch's for the same job.

Same simulator, same costs, same shapes. The figures are data in `results/simulated`, and
`docs/apple-gpus.md` is written from them.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

import metalcore
from metalcore._report import number

from . import peer_kernels as peers
from .counters import Time, recorded, slots_of, time_of
from .store import FOLDER

FILE = FOLDER / "simulated/beside.json"
PAGE = FOLDER.parent.parent / "docs/apple-gpus.md"
CHIPS = ("M1", "M2 Max", "M4 Pro")
_DIGITS = 3


@dataclass(frozen=True)
class Job:
    """`ours` runs metalcore; with `backward` only the gradients count."""

    name: str
    inputs: Callable[[torch.dtype], Sequence[Tensor]]
    ours: Callable[..., Any]
    theirs: dict[str, peers.Launches]
    backward: bool = False


@dataclass
class Side:
    """What one library needs for a job, for each of its values; the group of its largest launch
    and the largest that fits an M1; the time to issue over that of the memory, on the chip where
    it is the largest. Where it cannot be told, `problem` says why."""

    job: str
    shape: str
    dtype: str
    library: str
    launches: int = 0
    slots: float = 0.0
    bytes: float = 0.0
    group: int = 0
    largest_group: int = 0
    half_registers: int = 0
    times: tuple[Time, ...] = ()
    issue_share: float = 0.0
    tightest_chip: str = ""
    problem: str = ""


def _rows(rows: int, n: int, vectors: int) -> Callable[[torch.dtype], list[Tensor]]:
    return lambda dtype: [
        torch.randn(rows, n, dtype=dtype),
        *(torch.randn(n, dtype=dtype) for _ in range(vectors)),
    ]


def _logits(rows: int, n: int) -> Callable[[torch.dtype], list[Tensor]]:
    return lambda dtype: [torch.randn(rows, n, dtype=dtype), torch.randint(0, n, (rows,))]


def _heads(dtype: torch.dtype) -> list[Tensor]:
    q, k = (torch.randn(1, heads, 1024, 128, dtype=dtype) for heads in (24, 8))
    cos, sin = metalcore.RotaryEmbedding(128)(q, torch.arange(1024)[None])
    return [q, k, cos, sin]


def _loss(x: Tensor, target: Tensor) -> Tensor:
    return metalcore.cross_entropy(x.requires_grad_(), target)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return metalcore.layer_norm(x, x.shape[-1:], weight, bias)


def _gelu_tanh(x: Tensor) -> Tensor:
    return metalcore.gelu(x, approximate="tanh")


def _queries(length: int, keys: int) -> Callable[[torch.dtype], list[Tensor]]:
    return lambda dtype: [
        torch.randn(1, heads, rows, 128, dtype=dtype)
        for heads, rows in ((8, length), (2, keys), (2, keys))
    ]


def _int4(rows: int) -> Callable[[torch.dtype], list[Tensor]]:
    def inputs(dtype: torch.dtype) -> list[Tensor]:
        q = metalcore.quantize_int4(torch.randn(256, 4096, dtype=dtype))
        assert q.bias is not None
        return [torch.randn(rows, 4096, dtype=dtype), q.packed, q.scale, q.bias]

    return inputs


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return metalcore.attention(q, k, v, causal=True)


def _matmul_int4(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return metalcore.matmul_int4(x, metalcore.quant.QuantizedInt4(packed, scale, bias, 64, 4096))


JOBS = (
    Job(
        "rms_norm",
        _rows(1024, 4096, 1),
        metalcore.rms_norm,
        {"mlx": peers.mlx_rms_norm, "torch": peers.torch_rms_norm},
    ),
    Job(
        "rms_norm, gradients",
        _rows(1024, 4096, 1),
        metalcore.rms_norm,
        {"mlx": peers.mlx_rms_norm_backward},
        backward=True,
    ),
    Job(
        "layer_norm",
        _rows(1024, 4096, 2),
        _layer_norm,
        {"mlx": peers.mlx_layer_norm, "torch": peers.torch_layer_norm},
    ),
    Job(
        "layer_norm, gradients",
        _rows(1024, 4096, 2),
        _layer_norm,
        {"mlx": peers.mlx_layer_norm_backward},
        backward=True,
    ),
    Job("softmax", _rows(1024, 4096, 0), metalcore.softmax, {"mlx": peers.mlx_softmax}),
    Job("softmax", _rows(128, 32000, 0), metalcore.softmax, {"mlx": peers.mlx_softmax}),
    Job(
        "cross_entropy with its gradient",
        _logits(128, 32000),
        _loss,
        {"mlx": peers.mlx_cross_entropy},
    ),
    Job("rope", _heads, metalcore.apply_rotary_pos_emb, {"mlx": peers.mlx_rope}),
    Job("silu", _rows(1024, 4096, 0), metalcore.silu, {"torch": peers.torch_silu}),
    Job("gelu", _rows(1024, 4096, 0), metalcore.gelu, {"torch": peers.torch_gelu}),
    Job("gelu, tanh", _rows(1024, 4096, 0), _gelu_tanh, {"torch": peers.torch_gelu_tanh}),
    Job("attention, causal", _queries(512, 512), _causal, {"mlx": peers.mlx_attention}),
    Job(
        "attention_decode of 1024 keys",
        _queries(1, 1024),
        metalcore.attention_decode,
        {"mlx": peers.mlx_attention_decode},
    ),
    Job("matmul_int4 of 256x4096", _int4(1), _matmul_int4, {"mlx": peers.mlx_matmul_int4}),
    Job("matmul_int4 of 256x4096", _int4(64), _matmul_int4, {"mlx": peers.mlx_matmul_int4}),
)
DTYPES = (torch.float32, torch.bfloat16)


def _our_profiles(job: Job, inputs: Sequence[Tensor]) -> list[Any]:
    with recorded(checked=False) as (_, profiles):
        for x in inputs:
            x.requires_grad_(job.backward and x.is_floating_point())
        output = job.ours(*inputs)
        if job.backward:
            profiles.clear()
            output.backward(torch.randn_like(output))
        return list(profiles)


def _their_profiles(launches: Sequence[peers.Peer]) -> list[Any]:
    import mslsim

    return [
        mslsim.profile(
            p.source,
            "peer",
            p.args,
            p.threads,
            p.group,
            include=p.include,
            constants=p.constants,
            strict=False,
        )
        for p in launches
    ]


def _side(job: Job, inputs: Sequence[Tensor], library: str, profiles: Sequence[Any]) -> Side:
    values = sum(x.numel() for x in inputs if x.dim() == inputs[0].dim() and x.dim() > 1)
    if job.name == "rope":
        values = inputs[0].numel() + inputs[1].numel()
    widest = max(profiles, key=lambda p: p.group_threads / p.fit.largest_group)
    return Side(
        job.name,
        "x".join(map(str, inputs[0].shape)),
        str(inputs[0].dtype).removeprefix("torch."),
        library,
        len(profiles),
        slots_of(profiles) / values,
        sum(p.moved for p in profiles) / values,
        widest.group_threads,
        widest.fit.largest_group,
        max(p.fit.half_registers for p in profiles),
        tuple(time_of(profiles, chip) for chip in CHIPS),
        *_tightest(profiles),
    )


def _tightest(profiles: Sequence[Any]) -> tuple[float, str]:
    """The largest share of issue over memory, of cores that have enough to do, and its chip."""
    from mslsim.model import chips, issue_seconds, memory_seconds

    slots = sum(max(p.work.issue, p.work.complex) for p in profiles)
    needed = sum(p.work.needed for p in profiles)
    return max(
        (issue_seconds(chip, slots) / memory_seconds(chip, needed), chip.name)
        for chip in chips().values()
    )


def compare(job: Job, dtype: torch.dtype, sources: peers.Sources) -> list[Side]:
    """Ours, then each of theirs."""
    torch.manual_seed(0)
    inputs = job.inputs(dtype)
    sides = [_side(job, inputs, "metalcore", _our_profiles(job, inputs))]
    inputs = [x.detach() for x in inputs]
    for library, launches in job.theirs.items():
        try:
            profiles = _their_profiles(launches(sources, *inputs))
            sides.append(_side(job, inputs, library, profiles))
        except peers.Missing as missing:
            ours = sides[0]
            sides.append(Side(job.name, ours.shape, ours.dtype, library, problem=str(missing)))
    return sides


def run(checkouts: Path | None, keep: bool = False) -> int:
    """Compare all jobs; `keep` stores the figures."""
    sources = peers.Sources(checkouts)
    todo = [(job, dtype) for job in JOBS for dtype in DTYPES]
    stderr = Console(stderr=True)
    sides = [
        side
        for job, dtype in track(todo, "simulating", console=stderr, transient=True)
        for side in compare(job, dtype, sources)
    ]
    print(table(sides))
    if keep:
        missing = [side.problem for side in sides if side.problem]
        if missing:
            stderr.print(f"bench: not stored: {missing[0]}", style="red", highlight=False)
            return 2
        FILE.parent.mkdir(exist_ok=True)
        lines = ",\n".join(f"  {json.dumps(_rounded(asdict(side)))}" for side in sides)
        about = json.dumps({name: _version(name) for name in ("metalcore-torch", "mlx", "torch")})
        FILE.write_text(f'{{\n"versions": {about},\n"sides": [\n{lines}\n]\n}}\n')
        PAGE.write_text(page())
        for file in (FILE, PAGE):
            stderr.print(f"wrote {file}", highlight=False)
    return 0


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def load() -> list[Side]:
    """The stored figures."""
    if not FILE.exists():
        return []
    found = json.loads(FILE.read_text())["sides"]
    return [Side(**s | {"times": tuple(Time(**t) for t in s["times"])}) for s in found]


def table(sides: Sequence[Side]) -> str:
    """Markdown: a line for each side, the libraries of a job below each other."""
    head = ["job", "library", "slots/value", "bytes/value", "group/fits", "half registers"]
    head += ["issue/memory"]
    head += [f"{chip}, ms" for chip in CHIPS]
    lines = [head, ["---", "---", *["---:"] * (len(head) - 2)]]
    for s in sides:
        name = f"{s.job} {s.shape} {s.dtype}" if s.library == "metalcore" else ""
        if s.problem:
            lines.append([name, s.library, s.problem, *[""] * (len(head) - 3)])
            continue
        figures = [number(s.slots), number(s.bytes), f"{s.group}/{s.largest_group}"]
        times = [_time(time) for time in s.times]
        share = f"{s.issue_share:.2f} ({s.tightest_chip})"
        lines.append([name, s.library, *figures, str(s.half_registers), share, *times])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _time(time: Time) -> str:
    """Milliseconds, with what decides in brackets where it is not the memory."""
    if time.total is None:
        return "does not start" if time.limiter == "registers" else "-"
    why = "" if time.limiter == "memory" else f" ({time.limiter})"
    return f"{number(time.total)}{why}"


def page() -> str:
    """The document, from what is stored."""
    return f"""\
# How would the Metal kernels do on an Apple GPU?

`metalcore bench --sim --peers FOLDER --store` writes this page from
[beside.json](../bench/results/simulated/beside.json).

**Nothing here was measured on a GPU.** It is what [mslsim](simulator.md) counts, and what its model
estimates: the same simulator, costs and shapes for our kernels and for those of MLX and torch.
Theirs come from the headers of their wheels. What no wheel has (norms and rope
of MLX, all of torch) comes from their repositories, as of about that release.

- **slots/value**: issue slots for each value of the input. They matter where issue decides.
- **bytes/value**: moved between memory and the GPU; what a threadgroup reads again is counted.
- **group/fits**: threads of a threadgroup, and the most that the registers of an M1 allow.
- **issue/memory**: the time to issue over that of the memory, on the chip where it is largest.
  Below 1, memory decides.
- **ms**: the estimated time of all launches. In brackets: what decides, if not the memory.
  A dash: no estimate, because the kernel mostly waits.

{table(load())}
MLX's gradients of the norms add up the rows of dweight, and of dbias, in launches of their own,
each taken for one pass. Not compared: swiglu and AdamW. MLX has no kernels of its own for them;
torch has two launches for the first, and for the second one that takes pointers in a buffer, which
mslsim does not run. For softmax, cross entropy and the gradients of norms, torch calls MPSGraph.
"""
