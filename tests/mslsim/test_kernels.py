# SPDX-License-Identifier: MIT
"""Every kernel of the corpus: the bug is found at its line, the fixed twin is silent.

kernels/<topic>/<name>.metal holds a bug, <name>_fixed.metal does not, and <name>.toml has the
launch of both and the findings to expect.
"""

from pathlib import Path

import pytest

import mslsim
from mslsim.spec import load

CORPUS = Path(__file__).parent / "kernels"
SPECS = sorted(CORPUS.glob("*/*.toml"))
IDS = [f"{p.parent.name}/{p.stem}" for p in SPECS]


def run(spec_path: Path, source: Path) -> mslsim.Report:
    spec = load(spec_path)
    return mslsim.run(
        source.read_text(),
        spec.kernel,
        spec.arguments,
        spec.threads,
        spec.group_size,
        name=source.name,
        **spec.options,
    )


@pytest.mark.parametrize("path", SPECS, ids=IDS)
def test_the_bug_is_found_at_its_line(path: Path) -> None:
    source = path.with_suffix(".metal")
    report = run(path, source)
    expected = [(e["kind"], source.name, e["line"]) for e in load(path).expect]
    assert expected
    assert sorted((f.kind, f.file, f.line) for f in report.findings) == sorted(expected)


@pytest.mark.parametrize("path", SPECS, ids=IDS)
def test_the_fixed_twin_is_silent(path: Path) -> None:
    report = run(path, path.with_name(f"{path.stem}_fixed.metal"))
    assert report.ok, str(report)


def test_the_corpus_is_complete() -> None:
    sources = sorted(CORPUS.glob("*/*.metal"))
    assert len(sources) >= 80
    assert len(sources) == 2 * len(SPECS)
