# SPDX-License-Identifier: MIT
"""Imports only go down, and no file is too long to be one story."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHON = sorted(p for root in ("src", "bench", "tests") for p in (ROOT / root).rglob("*.py"))

# Lower layers first. A module imports its own layer and those below it.
LAYERS = [
    {
        "_command",
        "_empty",
        "_installed",
        "_lazy",
        "_measure",
        "_native",
        "_optional",
        "_report",
        "_text",
        "_torch",
        "_trace",
    },
    {"_autocast", "_autograd", "_check", "_policy"},
    {"_accuracy", "_op", "_route", "_sharding"},
    {"metal", "ops"},
    {
        "_quantized_layers",
        "_shards",
        "nn",
        "optim",
        "attn",
        "decode",
        "linalg",
        "precise",
        "quant",
        "train",
        "xlstm",
    },
    {"patch", "gguf", "hf", "checkpoints", "_simulate", "_where"},
    {"chat", "finetune", "mlx"},
    {"serve", "cli_serve"},
    {"doctor", "info", "_demo_models", "demo", "demo_processes", "bench", "integrations", "tune"},
    {"cli", "__main__", "__init__"},
]


def layer_of(module: str) -> int:
    for depth, names in enumerate(LAYERS):
        if module in names:
            return depth
    raise AssertionError(f"metalcore.{module} is in no layer of tests/test_layering.py")


def imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "src/metalcore").rglob("*.py")), ids=str)
def test_imports_go_down(path: Path) -> None:
    inside = path.relative_to(ROOT / "src/metalcore").with_suffix("")
    own = inside.parts[0]
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "metalcore" and len(parts) > 1 and parts[1] != own:
            assert layer_of(parts[1]) <= layer_of(own), f"{inside} imports {name}"
    if own == "metal":
        assert not [n for n in imported(path) if n.startswith("metalcore.ops")]


def test_the_simulator_knows_nothing_of_metalcore() -> None:
    for path in (ROOT / "src/mslsim").rglob("*.py"):
        assert not [n for n in imported(path) if n.split(".")[0] == "metalcore"], path


def test_cpp_kernels_know_no_python() -> None:
    for path in (ROOT / "csrc").rglob("*"):
        if path.is_file():
            assert "Python.h" not in path.read_text()


@pytest.mark.parametrize("path", PYTHON, ids=str)
def test_no_file_is_over_400_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
