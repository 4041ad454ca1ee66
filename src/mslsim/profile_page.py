# SPDX-License-Identifier: MIT
"""A profile as one HTML page that loads nothing: the source with its heat, and a table of chips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from .profile_report import CHIP_COLUMNS, TEXT_COLUMNS, chip_row, facts, hottest_places
from .profiling import Profile, costs

# Lines around a hot one that stay open; longer cold parts are folded.
_CONTEXT = 3

_STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --soft: #66707f; --line: #e3e6ea;
  --page: #fff; --card: #f6f7f9; --heat: 226, 88, 34; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ee; --soft: #97a1b0;
  --line: #2d343f; --page: #14181e; --card: #1c222b; --heat: 255, 132, 66; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 2.5rem 1.5rem 4rem; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2.4rem 0 .6rem; }
p { margin: .3rem 0; color: var(--soft); max-width: 46rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .7rem;
  margin-top: 1.4rem; }
.cards div { background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }
.cards b { display: block; font-size: 1.1rem; font-variant-numeric: tabular-nums; }
.cards span { color: var(--soft); font-size: .82rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { color: var(--soft); font-weight: 500; font-size: .85rem; }
th.t, td.t { text-align: left; }
.bar { display: inline-block; height: .7rem; border-radius: .2rem; background: rgb(var(--heat)); }
.code { font: 12.5px/1.55 ui-monospace, Menlo, Consolas, monospace; border: 1px solid var(--line);
  border-radius: .5rem; overflow-x: auto; padding: .4rem 0; }
.row { display: grid; grid-template-columns: 4.4rem 4.4rem 3.2rem 1fr; min-width: max-content; }
.row > * { padding: 0 .6rem; white-space: pre; }
.row i { font-style: normal; text-align: right; color: var(--soft); }
.row .hot { color: var(--text); background: rgba(var(--heat), var(--h)); }
.head { color: var(--soft); border-bottom: 1px solid var(--line); margin-bottom: .3rem; }
summary { color: var(--soft); cursor: pointer; padding: .1rem .6rem .1rem 9.4rem; }
"""


def page(profile: Profile, chips: Sequence[str], lines: Mapping[str, Sequence[str]]) -> str:
    """The whole page."""
    cards = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>"
        for name, value in facts(profile).items()
    )
    sources = "".join(
        _source(profile, file, hot, lines[file])
        for file, hot in hottest_places(profile).items()
        if file in lines
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(profile.kernel)}: profile</title><style>{_STYLE}</style></head><body>
<h1>{escape(profile.kernel)}</h1>
<p>{profile.threads:,} threads in {profile.groups:,} threadgroups of {profile.group_threads}.
Counted by mslsim on a CPU; nothing here was measured on a GPU.</p>
<div class="cards">{cards}</div>
<h2>Time of one launch</h2>
<p>Milliseconds. The longest of memory, issue, complex functions and threadgroup starts decides;
resident are the simdgroups that a core holds at a time.</p>
<div class="scroll">{_chips(profile, chips)}</div>
<h2>Where the slots go</h2>
<p>Issue slots of a thread by kind of instruction.</p>
<div class="scroll">{_classes(profile)}</div>
{sources}
</body></html>
"""


def _chips(profile: Profile, chips: Sequence[str]) -> str:
    kinds = [' class="t"' if name in TEXT_COLUMNS else "" for name in CHIP_COLUMNS]
    head = "".join(f"<th{k}>{name}</th>" for k, name in zip(kinds, CHIP_COLUMNS, strict=True))
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td{k}>{escape(cell)}</td>"
            for k, cell in zip(kinds, chip_row(profile.estimate(name)), strict=True)
        )
        + "</tr>"
        for name in chips
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def _classes(profile: Profile) -> str:
    rows = "".join(
        f'<tr><td class="t">{name.replace("_", " ")}</td><td>{slots / max(costs()[name]):,.1f}</td>'
        f"<td>{max(costs()[name]):g}</td><td>{slots:,.1f}</td><td>{slots / profile.slots:.1%}</td>"
        f'<td class="t"><span class="bar" style="width:{14 * slots / profile.slots:.2f}rem"></span>'
        "</td></tr>"
        for name, slots in profile.classes.items()
    )
    head = "<th>count</th><th>each</th><th>slots</th><th>share</th><th></th>"
    return f'<table><tr><th class="t">instructions</th>{head}</tr>{rows}</table>'


def _source(profile: Profile, file: str, hot: Mapping[int, float], text: Sequence[str]) -> str:
    """One file, with cold parts folded."""
    called = {line: slots for (name, line), slots in profile.called.items() if name == file}
    near = {line + d for line in called for d in range(-_CONTEXT, _CONTEXT + 1)}
    parts: list[str] = []
    folded: list[str] = []

    def unfold() -> None:
        if len(folded) > 1:
            rows = "".join(folded)
            parts.append(f"<details><summary>{len(folded)} lines</summary>{rows}</details>")
        else:
            parts.extend(folded)
        folded.clear()

    for number, code in enumerate(text, 1):
        row = _row(profile, number, code, hot.get(number), called.get(number))
        if number in near:
            unfold()
            parts.append(row)
        else:
            folded.append(row)
    unfold()
    share = sum(hot.values()) / profile.slots
    head = '<div class="row head"><i>slots</i><i>with calls</i><i></i><span></span></div>'
    return (
        f"<h2>{escape(Path(file).name)} <small>{share:.0%} of the slots</small></h2>"
        f'<div class="code">{head}{"".join(parts)}</div>'
    )


def _row(profile: Profile, number: int, code: str, own: float | None, called: float | None) -> str:
    heat = ""
    if own:
        heat = f' class="hot" style="--h:{min(0.85, 0.08 + (own / profile.slots) ** 0.5):.2f}"'
    return (
        f'<div class="row"><i{heat}>{_slots(own)}</i><i>{_slots(called)}</i><i>{number}</i>'
        f"<span>{escape(code)}</span></div>"
    )


def _slots(value: float | None) -> str:
    return f"{value:,.1f}" if value else ""
