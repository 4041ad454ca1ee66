# SPDX-License-Identifier: MIT
"""The documents that show stored figures: `docs/performance.md`, and figures quoted in others.

A figure is quoted behind a comment that names its row, which no reader sees:

    <!-- x86-avx512: train/silu (forward+backward) 1024x4096 bfloat16 -->2.1x
    <!-- x86-avx512: program/training_step 4x256 float32 torch fused -->51%

The peer is torch where none is named. `x` is how many times as fast, `%` the share of its memory.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

from metalcore._report import number

from . import beside, precision
from .harness import Row
from .machine import counted
from .patch.overrides import SMALL
from .plot import Dots, svg
from .store import FOLDER, Results, load

ROOT = FOLDER.parent.parent
PAGE = ROOT / "docs/performance.md"
PLOTS = ROOT / "docs/figures"
QUOTED = re.compile(r"<!-- (?P<machine>[\w-]+): (?P<row>[^>]+) -->(?P<figure>[\d.]+(?P<unit>[x%]))")

_ROW = re.compile(r"(?P<op>\S+(?: \(.*\))?) (?P<shape>[\dx]+) (?P<dtype>\w+)(?: (?P<peer>.+))?")
# What families are called, those of ops by their own name.
_TITLES = {
    "program": "Whole models",
    "train": "Training ops",
    "attention": "Attention",
    "xlstm": "xLSTM",
    "quant": "Packed weights, beside products with whole ones",
    "linalg": "Linear algebra",
    "precise": "Sums and products without error, beside torch's with it",
    "patch": "torch's own functions, with overrides",
}
_GRADIENTS = "forward+backward"

_INTRO = """\
# How fast is it?

`metalcore bench --docs` writes this page from the files in [bench/results](../bench/results).
No figure is typed by hand.

**Nothing here was measured on an Apple GPU.** No Metal kernel has run on one yet; what a model
estimates for them is in [apple-gpus.md](apple-gpus.md).

- A figure is the time of the other side divided by metalcore's. Above 1, metalcore is faster.
- Both sides run in one process, in turns, and the fastest of many rounds counts.
- A result is compared with the truth in float64 before it is timed. A wrong one gets no time.
- A dot is one size and dtype. A ring is the same with gradients.
- Sizes go from one short row or one tiny matrix, where a call costs more than the work, to what
  fills the memory of a small machine. `metalcore bench --html bench.html` shows them one by one.
"""


def write() -> list[Path]:
    """Bring all documents up to date; the files that changed. A ValueError names a figure that is
    quoted and not stored."""
    results = load()
    texts = pages(results) | precision.plots(PLOTS)
    for stale in set(PLOTS.glob("*.svg")) - set(texts):
        stale.unlink()
    for file in documents():
        try:
            texts[file] = quoted(file.read_text(), results)
        except ValueError as problem:
            raise ValueError(f"bench: {file.name} quotes {problem}") from None
    texts[beside.PAGE] = beside.page()
    changed = [f for f, text in texts.items() if not f.exists() or f.read_text() != text]
    for file in changed:
        file.parent.mkdir(exist_ok=True)
        file.write_text(texts[file])
    return changed


def documents() -> list[Path]:
    """Those that people write, and that may quote figures."""
    generated = {PAGE, beside.PAGE}
    return [ROOT / "README.md", *sorted(set((ROOT / "docs").glob("*.md")) - generated)]


def quoted(text: str, results: Mapping[str, Results]) -> str:
    """`text` with every quoted figure as it is stored."""

    def stored(match: re.Match[str]) -> str:
        row = _find(match["machine"], match["row"], results)
        if match["unit"] == "x" and row.ratio is not None:
            figure = f"{number(row.ratio, 2)}x"
        elif match["unit"] == "%" and row.mib is not None and row.peer_mib is not None:
            figure = f"{row.mib / row.peer_mib:.0%}"
        else:
            raise ValueError(f"{match[0]}, but the row has no such figure")
        return f"<!-- {match['machine']}: {match['row']} -->{figure}"

    return QUOTED.sub(stored, text)


def _find(machine: str, name: str, results: Mapping[str, Results]) -> Row:
    wanted = _ROW.fullmatch(name)
    if wanted is None or machine not in results:
        raise ValueError(f"{machine}: {name}, which is no stored machine class, op, shape, dtype")
    key = (wanted["op"], wanted["shape"], wanted["dtype"], wanted["peer"] or "torch")
    for row in results[machine].rows:
        if (row.op, row.shape, row.dtype, row.peer) == key:
            return row
    raise ValueError(f"{machine}: {name}, which is not stored")


def pages(results: Mapping[str, Results]) -> dict[Path, str]:
    """The page and its plots, by file."""
    files: dict[Path, str] = {}
    text = [_INTRO]
    for machine, stored in results.items():
        text.append(_about(machine, stored))
        families = dict.fromkeys([*_TITLES, *(row.op.partition("/")[0] for row in stored.rows)])
        for family in families:
            title = _TITLES.get(family, family)
            rows = [row for row in stored.rows if row.op.startswith(f"{family}/")]
            shown = [row for row in rows if row.peer == "torch" and f"({SMALL})" not in row.op]
            if not any(row.ratio for row in shown):
                continue
            plot = PLOTS / f"{machine}-{family}.svg"
            files[plot] = svg(_dots(f"{title}: times as fast as torch", shown))
            text.append(f"### {title}\n\n![{title}](figures/{plot.name})\n")
            text.append(_table(shown))
            text.append(_small_calls(rows))
        text.append(_others(stored.rows))
    files[PAGE] = "\n".join(filter(None, text))
    return files


def _about(machine: str, stored: Results) -> str:
    m = stored.machine
    busy = (
        "\n**The machine was busy when this was measured: these figures show the order of "
        "magnitude, no more.**\n"
    )
    return f"""\
## {machine}

{m.processor}, {counted(m.cores, "core")}, {m.system}; {counted(m.threads, "thread")}.
torch {m.torch}, metalcore {m.metalcore}, {m.date}.
{busy * m.is_busy}
To repeat it on your machine: `metalcore bench --threads {m.threads}` (everything, an hour) or
`metalcore bench train/silu` (one op, a minute). In a checkout, `--store` keeps the figures here.
"""


def _of_op(rows: Iterable[Row]) -> dict[str, tuple[list[Row], list[Row]]]:
    """By op: the rows of the forward pass, and those with gradients."""
    found: dict[str, tuple[list[Row], list[Row]]] = {}
    for row in rows:
        name = re.sub(rf"(?: \(|, ){re.escape(_GRADIENTS)}(?=\))", "", row.op.partition("/")[2])
        name = name.removesuffix(")") if name.count("(") < name.count(")") else name
        found.setdefault(name, ([], []))[_GRADIENTS in row.op].append(row)
    return found


def _ratios(rows: Sequence[Row]) -> list[float]:
    return [row.ratio for row in rows if row.ratio is not None]


def _dots(title: str, rows: Sequence[Row]) -> Dots:
    of_op = {op: both for op, both in _of_op(rows).items() if _ratios(both[0] + both[1])}

    def values(dtype: str, gradients: bool) -> list[list[float]]:
        return [
            _ratios([r for r in both[gradients] if r.dtype == dtype]) for both in of_op.values()
        ]

    dtypes = sorted({row.dtype for row in rows}, key=lambda dtype: (dtype != "float32", dtype))
    rings = {dtype: values(dtype, True) for dtype in dtypes}
    return Dots(
        title,
        "times as fast (logarithmic)",
        list(of_op),
        {dtype: values(dtype, False) for dtype in dtypes},
        rings if any(of_op[1] for of_op in of_op.values()) else {},
        "with gradients",
    )


def _table(rows: Sequence[Row]) -> str:
    of_op = _of_op(rows)
    gradients = any(both[1] for both in of_op.values())
    memory = any(row.mib for row in rows)
    head = ["", "times as fast as torch", *["with gradients"] * gradients, "lowest at"]
    head += ["memory"] * memory
    lines = [head, ["---"] * len(head)]
    for op, both in of_op.items():
        line = [f"`{op}`", _spread(both[0]), *[_spread(both[1])] * gradients]
        line += [_lowest(both[0] + both[1]), *[_memory(both[0] + both[1])] * memory]
        lines.append(line)
    return _markdown(lines)


def _spread(rows: Sequence[Row]) -> str:
    ratios = _ratios(rows)
    if not ratios:
        return "-"
    ends = "" if len(ratios) == 1 else f" ({_two(min(ratios))} to {_two(max(ratios))})"
    return f"{_two(median(ratios))}{ends}"


def _lowest(rows: Sequence[Row]) -> str:
    timed = [row for row in rows if row.ratio is not None]
    if not timed:
        return "-"
    row = min(timed, key=lambda row: row.ratio or 0)
    return f"{row.shape} {row.dtype}{', with gradients' * (_GRADIENTS in row.op)}"


def _memory(rows: Sequence[Row]) -> str:
    shares = [row.mib / row.peer_mib for row in rows if row.mib and row.peer_mib]
    return f"{median(shares):.0%}" if shares else "-"


def _small_calls(rows: Sequence[Row]) -> str:
    """What it costs to ask whether a call is taken, where it is not."""
    small = [row for row in rows if f"({SMALL})" in row.op]
    left = [row for row in small if not row.backend]
    more = [
        1e3 * (row.ms - row.peer_ms)
        for row in left
        if isinstance(row.ms, float) and isinstance(row.peer_ms, float)
    ]
    if not more:
        return ""
    return (
        f"Of {len(small)} tiny calls, such as {left[0].shape}, {len(left)} are left to torch. "
        f"Asking costs them {_two(min(more))} to {_two(max(more))} us, {_two(median(more))} us in "
        "the middle.\n"
    )


def _others(rows: Sequence[Row]) -> str:
    """A line for each other peer: in how many cases, and how many times as fast."""
    peers = sorted({row.peer for row in rows if row.peer and row.peer != "torch" and row.ratio})
    if not peers:
        return ""
    lines = [["", "ops", "cases", "times as fast"], ["---"] * 4]
    for peer in peers:
        against = [row for row in rows if row.peer == peer and row.ratio]
        ops = {row.op.partition(" ")[0] for row in against}
        lines.append([peer, str(len(ops)), str(len(against)), _spread(against)])
    return f"### Other libraries\n\n{_markdown(lines)}"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _two(value: float) -> str:
    return number(value, 2)
