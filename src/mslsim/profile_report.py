# SPDX-License-Identifier: MIT
"""A profile as text for a terminal, and one profile beside another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from .model import Estimate
from .profiling import Profile

# Lines of source that a terminal shows, and characters of each.
_SHOWN = 10
_CODE = 64
LIMITERS = {
    "memory": "memory",
    "issue": "issue slots",
    "complex": "complex functions",
    "starts": "threadgroup starts",
    "latency": "latency",
    "registers": "registers",
}


def source_lines(profile: Profile, name: str, text: str) -> dict[str, list[str]]:
    """The lines of every file that the profile names, as far as they can be found."""
    found = {}
    for file in dict.fromkeys(file for file, _ in profile.called):
        if file == name:
            found[file] = text.splitlines()
        elif Path(file).is_file():
            found[file] = Path(file).read_text().splitlines()
    return found


def size(count: float) -> str:
    """Bytes with a unit: 512 B, 16.8 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} GB"


def milliseconds(value: float | None) -> str:
    """Three digits, as much as the model has."""
    if value is None:
        return "-"
    return f"{value:#.3g}".rstrip(".") if value >= 1e-3 else "0.000"


def facts(profile: Profile) -> dict[str, str]:
    """The figures that hold on every chip, by what they are."""
    ratio = profile.moved / profile.needed if profile.needed else 1.0
    return {
        f"moved, {ratio:.2f} x needed": size(profile.moved),
        "lines per access": f"{profile.lines_per_access:.2f}",
        "slots per thread": f"{profile.slots:,.0f}",
        "lanes at work": f"{profile.lanes_used:.0%}",
        "barriers": f"{profile.barriers:g}",
        "half registers": str(profile.fit.half_registers),
        "largest group": str(profile.fit.largest_group),
        "of code": size(profile.fit.code_bytes),
    }


def chip_row(e: Estimate) -> list[str]:
    """Chip, its times, what decides, the estimate and how sure it is."""
    times = [milliseconds(t) for t in (e.memory, e.issue, e.complex, e.starts)]
    share = f", issue at {e.issue_share:.0%}" if e.limiter == "memory" else ""
    return [
        e.chip,
        *times,
        str(e.resident),
        LIMITERS[e.limiter] + share,
        milliseconds(e.total),
        e.confidence,
    ]


CHIP_COLUMNS = (
    "chip",
    "memory",
    "issue",
    "complex",
    "starts",
    "resident",
    "limited by",
    "ms",
    "how sure",
)
TEXT_COLUMNS = ("chip", "limited by", "how sure")


def show(
    profile: Profile, chips: Sequence[str], lines: Mapping[str, Sequence[str]], console: Console
) -> None:
    """Print a profile."""
    text = [
        f"{profile.kernel}: {profile.threads:,} threads in {profile.groups:,} groups of "
        f"{profile.group_threads}",
        *(f"  {value:>8}  {name}" for name, value in facts(profile).items()),
        "",
        *_aligned([CHIP_COLUMNS, *(chip_row(profile.estimate(n)) for n in chips)], TEXT_COLUMNS),
        "",
        "Milliseconds of one launch, by what it must do; the longest decides. Resident are the",
        "simdgroups that a core holds at a time.",
        "",
    ]
    rows = [("slots", "share", "line", "")]
    for (file, line), slots in list(profile.lines.items())[:_SHOWN]:
        code = _line(lines, file, line).strip()
        share = f"{slots / profile.slots:.1%}"
        rows.append((f"{slots:,.1f}", share, f"{Path(file).name}:{line}", code[:_CODE]))
    text += _aligned(rows, ("line", ""))
    console.print("\n".join(text), markup=False)


def _aligned(rows: Sequence[Sequence[str]], left: Sequence[str]) -> list[str]:
    """Rows under their head; columns of words, by name in `left`, begin at the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    words = [name in left for name in rows[0]]
    return [
        "  "
        + "  ".join(
            f"{cell:<{width}}" if word else f"{cell:>{width}}"
            for cell, width, word in zip(row, widths, words, strict=True)
        ).rstrip()
        for row in rows
    ]


def _line(lines: Mapping[str, Sequence[str]], file: str, line: int) -> str:
    text = lines.get(file, ())
    return text[line - 1] if 0 < line <= len(text) else ""


def ratios(new: Profile, old: Profile, chips: Sequence[str]) -> dict[str, float | None]:
    """New over old: below 1, the new one needs less."""

    def over(a: float | None, b: float | None) -> float | None:
        return a / b if a is not None and b else None

    found = {
        "slots": over(new.slots * new.threads, old.slots * old.threads),
        "bytes moved": over(new.moved, old.moved),
        "lines per access": over(new.lines_per_access, old.lines_per_access),
        "barriers": over(new.barriers, old.barriers),
    }
    for name in chips:
        found[f"time on {name}"] = over(new.estimate(name).total, old.estimate(name).total)
    return found


def show_ratios(found: Mapping[str, float | None], console: Console) -> None:
    """Print what `ratios` found."""
    console.print("\nnew over old, below 1 the new one needs less")
    for name, value in found.items():
        console.print(f"  {name:<20} {'-' if value is None else f'{value:.2f}'}")


def hottest_places(profile: Profile) -> dict[str, dict[int, float]]:
    """Slots by file and line, the files with most of them first."""
    files: dict[str, dict[int, float]] = {}
    for (file, line), slots in profile.lines.items():
        files.setdefault(file, {})[line] = slots
    return dict(sorted(files.items(), key=lambda item: -sum(item[1].values())))
