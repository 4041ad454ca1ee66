# SPDX-License-Identifier: MIT
"""A plot of dots as an SVG file."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from metalcore._report import COLOUR_CSS, COLOURS, svg_text

_CSS = (
    COLOUR_CSS
    + """.page { fill: var(--page); }
.fill { fill-opacity: 0.7; }
.ring { fill: none; stroke: currentColor; stroke-width: 1.8; }
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--ink); }
.title { font-size: 16px; font-weight: 600; }
.tick { fill: var(--soft); }
"""
)


@dataclass(frozen=True)
class Dots:
    """A line of dots per group on a logarithmic axis, with 1 marked.

    `dots` has, for each name, the values of each group; `rings` has more of the same names.
    """

    title: str
    unit: str
    groups: Sequence[str]
    dots: Mapping[str, Sequence[Sequence[float]]]
    rings: Mapping[str, Sequence[Sequence[float]]]
    rings_label: str


def svg(plot: Dots) -> str:
    """The plot as a file of its own, which takes the colours of the reader's system."""
    between, top, right = 22, 56, 744
    left = 24 + 7.2 * max(map(len, plot.groups), default=0)
    bottom = top + between * len(plot.groups)
    kinds = (("fill", plot.dots), ("ring", plot.rings))
    values = [v for _, series in kinds for groups in series.values() for g in groups for v in g]
    ticks = _log_ticks(min([*values, 1.0]), max([*values, 1.0]))
    low, high = math.log(ticks[0]), math.log(ticks[-1])

    def at(value: float) -> float:
        return left + (math.log(value) - low) / (high - low) * (right - left)

    out = [svg_text(16, 20, plot.title, "start", "title"), *_legend(plot, left)]
    for tick in ticks:
        kind = "mark" if tick == 1 else "grid"
        out.append(f'<path class="{kind}" d="M{at(tick):.0f} {top}V{bottom}"/>')
        out.append(svg_text(at(tick), bottom + 16, f"{tick:g}", "middle", "tick"))
    for g, group in enumerate(plot.groups):
        y = top + between * (g + 0.5)
        out.append(svg_text(left - 12, y + 4.5, group, "end"))
        for kind, series in kinds:
            for s, groups in enumerate(series.values()):
                out += [_dot(kind, s, at(value), y) for value in groups[g]]
    out.append(svg_text((left + right) / 2, bottom + 36, plot.unit, "middle", "tick"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {bottom + 48}" role="img" '
        f'aria-label="{escape(plot.title)}">\n<style>{_CSS}</style>\n'
        '<rect class="page" width="100%" height="100%"/>\n' + "\n".join(out) + "\n</svg>\n"
    )


def _legend(plot: Dots, x: float) -> list[str]:
    out = []
    names = [("fill", s, name) for s, name in enumerate(plot.dots)]
    names += [("ring", 0, plot.rings_label)] if plot.rings else []
    for kind, series, name in names:
        out += [_dot(kind, series, x, 38), svg_text(x + 10, 42, name, "start")]
        x += 36 + 7.2 * len(name)
    return out


def _dot(kind: str, series: int, x: float, y: float) -> str:
    return f'<circle class="{kind} k{series % COLOURS}" cx="{x:.0f}" cy="{y:.0f}" r="4.5"/>'


def _log_ticks(low: float, high: float) -> list[float]:
    """Values 1, 2 or 5 times a power of ten that enclose low..high; of many, only every other
    power or fewer."""
    first_power, last_power = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last_power - first_power > 6:
        step = -(-(last_power - first_power) // 8)
        # 1 is one of them
        below, above = math.floor(first_power / step), math.ceil(last_power / step)
        return [float(f"1e{i * step}") for i in range(below, above + 1)]
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [float(f"{m}e{p}") for p in powers for m in (1, 2, 5)]
    first = max((i for i, step in enumerate(steps) if step <= low), default=0)
    last = min(i for i, step in enumerate(steps) if step >= high)
    return steps[first : max(last, first + 1) + 1]
