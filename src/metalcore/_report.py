# SPDX-License-Identifier: MIT
"""HTML reports: one self-contained page of tables and plots, for a browser or a phone.

A page has no scripts and loads nothing. Plots are inline SVG, drawn in CSS pixels of a 480 wide
canvas, so that two fit beside each other on a desk and one fills a phone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

Cell = str | float | int | None

# Canvas of a plot, in CSS pixels.
_WIDTH = 480
# Width of a wide character of the 13 pixel font of the labels.
_CHARACTER = 8.4
COLOURS = 5


@dataclass(frozen=True)
class Table:
    """Rows of cells. Columns that hold a number or are in `numeric` are set to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numeric: Sequence[int] = ()
    note: str = ""


@dataclass(frozen=True)
class Bars:
    """Horizontal bars: one group per label, one bar per series; None leaves the bar out.

    `line` marks a value on the axis, for example 1.0 where bars are ratios.
    """

    title: str
    unit: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    line: float | None = None
    line_label: str = ""
    note: str = ""


@dataclass(frozen=True)
class Lines:
    """Curves: per series its points (x, y) in the order of x. Later series are drawn dashed, so
    that equal curves can both be seen."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    from_zero: bool = False
    note: str = ""
    # names for positions on the x axis, in place of round values
    x_names: Mapping[float, str] = field(default_factory=dict)
    # a value of y to be marked, for example 1.0 where curves are ratios
    line: float | None = None


Section = Table | Bars | Lines


def page(title: str, intro: Sequence[str], sections: Sequence[Section]) -> str:
    """The whole page as text. `intro` is one paragraph per entry."""
    body = [f"<h1>{escape(title)}</h1>"]
    body += [f"<p>{escape(paragraph)}</p>" for paragraph in intro]
    plots: list[str] = []
    for section in sections:
        if isinstance(section, Table):
            body += _side_by_side(plots)
            plots = []
            body.append(_table(section))
        else:
            plots.append(_bars(section) if isinstance(section, Bars) else _lines(section))
    body += _side_by_side(plots)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def number(value: float, digits: int = 3) -> str:
    """`value` with `digits` significant digits: 0.00123, 1.23, 123, 12,345, 1.2e-07."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -3:
        return f"{value:.1e}"
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def _side_by_side(plots: Sequence[str]) -> list[str]:
    return [f'<div class="plots">\n{"".join(plots)}</div>'] if plots else []


def _table(table: Table) -> str:
    numeric = [
        i in table.numeric or any(isinstance(row[i], float | int) for row in table.rows)
        for i in range(len(table.columns))
    ]
    kind = [' class="number"' if n else "" for n in numeric]
    head = "".join(f"<th{k}>{escape(c)}</th>" for k, c in zip(kind, table.columns, strict=True))
    rows = "\n".join(
        "<tr>"
        + "".join(f"<td{k}>{_cell(c)}</td>" for k, c in zip(kind, row, strict=True))
        + "</tr>"
        for row in table.rows
    )
    return (
        f'<section><h2>{escape(table.title)}</h2>\n<div class="scroll"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
        f"{_note(table.note)}</section>"
    )


def _cell(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return escape(value if isinstance(value, str) else number(value))


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>' if text else ""


def _figure(section: Bars | Lines, height: float, drawing: Sequence[str], dashed: bool) -> str:
    legend = ""
    if len(section.series) > 1:
        keys = "".join(
            f'<span class="key"><i class="{"stroke" if dashed else "fill"} k{i % COLOURS}"></i>'
            f"{escape(name)}</span>"
            for i, name in enumerate(section.series)
        )
        legend = f'<div class="legend">{keys}</div>'
    return (
        f"<figure><figcaption>{escape(section.title)}</figcaption>{legend}\n"
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(section.title)}">\n' + "\n".join(drawing) + f"\n</svg>"
        f"{_note(section.note)}</figure>\n"
    )


def _bars(plot: Bars) -> str:
    bar, gap, between, top = 14, 3, 16, 20 if plot.line is not None else 6
    left = min(200.0, 12 + _CHARACTER * max(map(len, plot.groups), default=0))
    # The longest bar keeps room for its value.
    right = _WIDTH - 52
    values = [v for bars in plot.series.values() for v in bars if v is not None]
    ticks = _ticks(0.0, max([*values, plot.line or 0.0, 1e-9]))
    scale = (right - left) / ticks[-1]
    of_group = len(plot.series) * (bar + gap) - gap
    bottom = top + len(plot.groups) * (of_group + between)
    out = []
    for tick in ticks:
        x = left + tick * scale
        out.append(f'<line class="grid" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}"/>')
        out.append(svg_text(x, bottom + 16, _tick(tick, ticks), "middle", "tick"))
    for g, group in enumerate(plot.groups):
        y = top + between / 2 + g * (of_group + between)
        out.append(svg_text(left - 8, y + of_group / 2 + 4.5, _label(group, left), "end"))
        for s, (name, bars) in enumerate(plot.series.items()):
            value, at = bars[g], y + s * (bar + gap)
            if value is None:
                continue
            label, shape = (
                f"{number(value)} {plot.unit}",
                _bar(left, at, max(value * scale, 1), bar),
            )
            out.append(
                f'<path class="fill k{s % COLOURS}" d="{shape}">'
                f"<title>{escape(f'{group}, {name}: {label}')}</title></path>"
            )
            out.append(
                svg_text(left + value * scale + 5, at + bar - 2.5, number(value), "start", "value")
            )
    if plot.line is not None:
        x = left + plot.line * scale
        out.append(f'<line class="mark" x1="{x:.1f}" y1="{top - 4}" x2="{x:.1f}" y2="{bottom}"/>')
        out.append(svg_text(max(x, left), top - 8, plot.line_label, "start", "tick"))
    out.append(svg_text((left + right) / 2, bottom + 36, plot.unit, "middle", "tick"))
    return _figure(plot, bottom + 44, out, dashed=False)


def _label(text: str, width: float) -> str:
    """`text` without its middle where it is too long; names differ at their ends."""
    most = int((width - 12) / 7.6)  # small letters are narrower
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 2 - 1) :]}"


def _bar(x: float, y: float, width: float, height: float) -> str:
    """A bar from the axis at `x`, rounded at its far end."""
    r = min(3.0, width)
    return (
        f"M{x:.1f} {y:.1f}h{width - r:.1f}a{r:.1f} {r:.1f} 0 0 1 {r:.1f} {r:.1f}"
        f"v{height - 2 * r:.1f}a{r:.1f} {r:.1f} 0 0 1 {-r:.1f} {r:.1f}h{r - width:.1f}z"
    )


def _lines(plot: Lines) -> str:
    left, right, top, bottom = 56, _WIDTH - 14, 26, 250
    points = [p for curve in plot.series.values() for p in curve]
    xs, ys = [x for x, _ in points] or [0.0], [y for _, y in points] or [0.0]
    y_ticks = _ticks(0.0 if plot.from_zero else min(ys), max(ys))
    x_round = [t for t in _ticks(min(xs), max(xs)) if min(xs) <= t <= max(xs)]
    x_names = plot.x_names or {t: _tick(t, x_round) for t in x_round}
    x_span, y_span = (max(xs) - min(xs)) or 1.0, (y_ticks[-1] - y_ticks[0]) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (x - min(xs)) / x_span * (right - left),
            bottom - (y - y_ticks[0]) / y_span * (bottom - top),
        )

    out = []
    for tick in y_ticks:
        _, y = at(min(xs), tick)
        out.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        out.append(svg_text(left - 8, y + 4.5, _tick(tick, y_ticks), "end", "tick"))
    for tick, name in x_names.items():
        x, _ = at(tick, y_ticks[0])
        out.append(svg_text(x, bottom + 18, name, "middle", "tick"))
    if plot.line is not None:
        _, y = at(min(xs), plot.line)
        out.append(f'<line class="mark" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
    for s, (name, curve) in enumerate(plot.series.items()):
        if len(curve) == 1:
            x, y = at(*curve[0])
            out.append(f'<circle class="fill k{s % COLOURS}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
        path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in curve)
        out.append(
            f'<polyline class="stroke k{s % COLOURS}" points="{path}">'
            f"<title>{escape(name)}</title></polyline>"
        )
    out.append(svg_text(8, 14, plot.y_label, "start", "tick"))
    out.append(svg_text((left + right) / 2, bottom + 38, plot.x_label, "middle", "tick"))
    return _figure(plot, bottom + 46, out, dashed=True)


def svg_text(x: float, y: float, text: str, anchor: str, kind: str = "label") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round values, four to seven of them, that enclose low..high."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _tick(value: float, ticks: Sequence[float]) -> str:
    """`value` with the decimals that tell these ticks apart."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    decimals = next((d for d in range(7) if abs(step * 10**d - round(step * 10**d)) < 1e-6), 7)
    return f"{value:,.{decimals}f}"


COLOUR_CSS = """
:root { color-scheme: light dark; --page: #fcfcfb; --ink: #1a1a19; --soft: #5c5b57; --rule: #e4e3df;
  --k0: #2a78d6; --k1: #d9541f; --k2: #158f63; --k3: #8a5cd1; --k4: #b07d00; }
@media (prefers-color-scheme: dark) {
  :root { --page: #1a1a19; --ink: #f2f1ed; --soft: #a9a8a2; --rule: #3a3936;
    --k0: #4a95ec; --k1: #ee7a48; --k2: #2fb585; --k3: #ab86e8; --k4: #d3a02a; } }
.k0 { color: var(--k0); } .k1 { color: var(--k1); } .k2 { color: var(--k2); }
.k3 { color: var(--k3); } .k4 { color: var(--k4); }
.grid { stroke: var(--rule); stroke-width: 1; }
.mark { stroke: var(--ink); stroke-width: 1.5; }
.fill { fill: currentColor; }
"""

_CSS = (
    COLOUR_CSS
    + """* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 24px 16px 48px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 12px; }
h2, figcaption { font-size: 17px; font-weight: 600; line-height: 1.3; margin: 0 0 8px; }
p { margin: 0 0 10px; max-width: 72ch; }
section { margin: 32px 0 0; }
.note { color: var(--soft); font-size: 13px; margin: 8px 0 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 14px 5px 0; text-align: left; white-space: nowrap;
  border-bottom: 1px solid var(--rule); }
th { color: var(--soft); font-weight: 600; }
.number { text-align: right; }
.plots { display: grid; gap: 32px; margin: 32px 0 0; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
figure { margin: 0; max-width: 620px; }
svg { display: block; width: 100%; height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; margin: 0 0 6px; }
.key { display: inline-flex; align-items: center; gap: 6px; }
.key i { width: 18px; height: 11px; border-radius: 2px; background: currentColor; }
.key i.stroke { height: 0; background: none; border-top: 3px solid; border-radius: 0; }
.key i.stroke.k1 { border-top-style: dashed; }
.key i.stroke.k2 { border-top-style: dotted; }
svg text { font-family: inherit; font-size: 13px; fill: var(--ink); }
svg .tick { fill: var(--soft); font-size: 12px; }
svg .value { font-size: 12px; font-variant-numeric: tabular-nums; }
.stroke { fill: none; stroke: currentColor; stroke-width: 2.5; stroke-linejoin: round; }
.stroke.k1 { stroke-dasharray: 7 5; }
.stroke.k2 { stroke-dasharray: 2 4; }
"""
)
