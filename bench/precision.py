# SPDX-License-Identifier: MIT
"""The plots of docs/precision.md: errors at each level, measured against exact fractions.

`python -m metalcore.bench.precision` measures them anew. They are data in `results/precision`, from
which `metalcore bench --docs` draws.
"""

import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

import metalcore
from metalcore import precise

from .plot import Dots, svg
from .store import FOLDER

FILE = FOLDER / "precision/errors.json"
Errors = dict[str, list[float]]

SUM_CONDITIONS = (1e0, 1e4, 1e8, 1e12, 1e16)
SYSTEM_CONDITIONS = (1e1, 1e3, 1e5, 1e7, 1e9)
THREADS = (1, 2, 3, 4)
_NAMES = {
    "sums": ("Sums of 4096 float32, by condition", "relative error; 1: no digit is right"),
    "systems": ("Systems of 24 equations, by condition", "relative error of the solution"),
    "threads": (
        "The mean of 10^6 losses, by number of threads",
        "error in units of the last place",
    ),
}


def _terms(condition: float, n: int = 4096) -> Tensor:
    """Numbers whose absolute values add up to `condition` times what they do."""
    generator = torch.Generator().manual_seed(0)
    half = torch.rand(n // 2, generator=generator)
    rest = torch.rand(n // 2, generator=generator) * (2 / condition if condition > 1 else 1)
    pairs = torch.cat((half, -half)) if condition > 1 else half
    return torch.cat((pairs, rest))[torch.randperm(len(pairs) + len(rest), generator=generator)]


def _relative(found: Tensor, truth: Fraction) -> float:
    # what is right to all digits has an error of its rounding, or none
    return max(float(abs(Fraction(found.item()) - truth) / abs(truth)), 1e-9)


def _sums() -> Errors:
    def simulated(x: Tensor) -> Tensor:
        with metalcore.simulate("none"):
            return precise.sum(x)

    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "torch.sum": torch.sum,
        "compensated": precise.sum,
        "compensated, GPU": simulated,
        "exact": lambda x: precise.sum(x, level="exact"),
    }
    found: Errors = {name: [] for name in ways}
    for condition in SUM_CONDITIONS:
        x = _terms(condition)
        truth = sum(map(Fraction, x.tolist()), Fraction(0))
        for name, way in ways.items():
            found[name].append(_relative(way(x), truth))
    return found


def _solution(A: Tensor, b: Tensor) -> list[Fraction]:
    """Of A x = b, by elimination of fractions."""
    rows = [
        [*map(Fraction, row), Fraction(r)] for row, r in zip(A.tolist(), b.tolist(), strict=True)
    ]
    for i in range(len(rows)):
        pivot = max(range(i, len(rows)), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [v / rows[i][i] for v in rows[i]]
        for r, row in enumerate(rows):
            if r != i:
                rows[r] = [v - row[i] * w for v, w in zip(row, rows[i], strict=True)]
    return [row[-1] for row in rows]


def _systems(n: int = 24) -> Errors:
    def simulated(A: Tensor, b: Tensor) -> Tensor:
        with metalcore.simulate("none"):
            found = metalcore.linalg.solve(A, b, precision="float64")
        assert isinstance(found, Tensor)
        return found.to(torch.float64)

    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "float32": torch.linalg.solve,
        "float64": lambda A, b: torch.linalg.solve(A.double(), b.double()),
        'precision="float64", GPU': simulated,
    }
    found: Errors = {name: [] for name in ways}
    generator = torch.Generator().manual_seed(0)
    for condition in SYSTEM_CONDITIONS:
        U, V = (torch.linalg.qr(torch.randn(n, n, generator=generator).double())[0] for _ in "UV")
        A = ((U * condition ** -torch.linspace(0, 1, n).double()) @ V).float()
        b = torch.randn(n, generator=generator)
        truth = torch.tensor([float(v) for v in _solution(A, b)], dtype=torch.float64)
        for name, way in ways.items():
            off = (way(A, b).double() - truth).norm() / truth.norm()
            found[name].append(max(off.item(), 1e-16))
    return found


def _threads() -> Errors:
    losses = torch.rand(10**6, generator=torch.Generator().manual_seed(0)).log().neg()
    truth = sum(map(Fraction, losses.tolist()), Fraction(0)) / len(losses)
    unit = 2.0 ** (math.floor(math.log2(float(truth))) - 23)
    found: Errors = {"torch.mean": [], "exact": []}
    before = torch.get_num_threads()
    for threads in THREADS:
        torch.set_num_threads(threads)
        for name, y in (
            ("torch.mean", losses.mean()),
            ("exact", precise.mean(losses, level="exact")),
        ):
            found[name].append(max(float(abs(Fraction(y.item()) - truth)) / unit, 0.01))
    torch.set_num_threads(before)
    return found


def measure() -> None:
    """Measure all of it, and keep it."""
    errors = {"sums": _sums(), "systems": _systems(), "threads": _threads()}
    rounded = {
        plot: {name: [float(f"{v:.2g}") for v in values] for name, values in series.items()}
        for plot, series in errors.items()
    }
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(rounded, indent=1) + "\n")


def plots(folder: Path) -> dict[Path, str]:
    """The plots of what is kept, by file."""
    if not FILE.exists():
        return {}
    groups = {
        "sums": [f"{c:.0e}" for c in SUM_CONDITIONS],
        "systems": [f"{c:.0e}" for c in SYSTEM_CONDITIONS],
        "threads": [f"{t} threads" if t > 1 else "1 thread" for t in THREADS],
    }
    found = {}
    for name, series in json.loads(FILE.read_text()).items():
        title, unit = _NAMES[name]
        dots = {key: [[v] for v in values] for key, values in series.items()}
        found[folder / f"precision-{name}.svg"] = svg(Dots(title, unit, groups[name], dots, {}, ""))
    return found


if __name__ == "__main__":
    measure()
