# SPDX-License-Identifier: MIT
"""Every op has its files under all roots, a bench, an example and a line in the docs."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import metalcore
from metalcore._op import Op

ROOT = Path(__file__).parent.parent
STORIES = sorted(
    str(p.relative_to(ROOT / "src/metalcore/ops").with_suffix(""))
    for p in (ROOT / "src/metalcore/ops").glob("*/[!_]*.py")
)
KERNEL_STORIES = {op.story for op in Op.all.values()}
# Sizes that choose between two algorithms of ours, whatever the machine.
BETWEEN_OURS = {"_BLOCK_ROWS", "_SVD_UP_TO"}
# Computed by their meaning on a GPU: their Metal kernels are not written yet.
WITHOUT_METAL = {"quant/quantize_ggml"}
FAMILIES = {"linalg", "train", "attention", "quant", "xlstm", "precise", "decode"}


def test_there_are_ops() -> None:
    assert "train/rms_norm" in STORIES


@pytest.mark.parametrize("story", STORIES)
def test_an_op_has_the_same_path_under_every_root(story: str) -> None:
    family, op = story.split("/")
    assert family in FAMILIES
    paths = [f"tests/{family}/test_{op}.py", f"bench/{story}.py"]
    # a formula over other ops needs no kernel of its own
    if story in KERNEL_STORIES:
        metal = f"src/metalcore/metal/{story}"
        paths += [f"csrc/cpu/{story}.cpp"]
        kernels = [f"{metal}.metal", f"{metal}.py"]
        assert story not in WITHOUT_METAL or not any((ROOT / k).exists() for k in kernels)
        paths += [] if story in WITHOUT_METAL else kernels
    for path in paths:
        assert (ROOT / path).exists(), f"{op} has no {path}"


@pytest.mark.parametrize("story", STORIES)
def test_an_op_is_tested_with_the_harness_benched_and_documented(story: str) -> None:
    family, op = story.split("/")
    test = (ROOT / f"tests/{family}/test_{op}.py").read_text()
    assert f'"{op}"' in test
    assert "check_op(" in test or story not in KERNEL_STORIES
    assert "BENCH" in (ROOT / f"bench/{story}.py").read_text()
    assert any(f"`{op}`" in page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert f"`{op}`" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("op", list(Op.all.values()), ids=lambda op: op.name)
def test_an_op_has_an_example_and_kernels_everywhere(op: Op) -> None:
    from metalcore import _where

    assert op.story in STORIES
    for backend in ("cpu",) if op.story in WITHOUT_METAL else ("cpu", "metal"):
        assert "float32" in _where.kernel_dtypes(op, backend), f"{op.name} has no {backend} kernel"


def test_public_functions_say_what_they_take_and_return() -> None:
    for name in metalcore.__all__:
        item = getattr(metalcore, name)
        assert item.__doc__, f"metalcore.{name} has no docstring"
        module = getattr(item, "__module__", "")
        if callable(item) and not isinstance(item, type) and ".ops." in module:
            for part in ("Args:", "Returns:", "Example:"):
                assert part in item.__doc__, f"metalcore.{name}: no {part} in its docstring"


def _is_size(node: ast.AST) -> bool:
    names = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    return bool(names & {"numel", "shape", "size", "nbytes"})


@pytest.mark.parametrize(
    "path", sorted((ROOT / "src/metalcore/ops").rglob("*.py")), ids=lambda p: p.stem
)
def test_no_size_in_an_op_decides_between_torch_and_ours(path: Path) -> None:
    """That is `_route.py`'s to say, with numbers of the machine."""
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    named = vars(importlib.import_module(".".join(parts)))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare) and _is_size(node):
            numbers = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
            names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - BETWEEN_OURS
            numbers += [named.get(name) for name in names]
            assert not [n for n in numbers if type(n) is int and n >= 32], ast.unparse(node)


def test_numbers_of_machines_are_in_one_place() -> None:
    assert not [*(ROOT / "src/metalcore/ops").rglob("*.toml")]
    for path in (ROOT / "src/metalcore").rglob("*.py"):
        assert "exec(" not in path.read_text(), path


@pytest.mark.parametrize("pattern", ["utils", "helpers", "common.py", "_v2", "_new", "legacy"])
def test_no_file_is_named_after_nothing(pattern: str) -> None:
    roots = ("src", "csrc", "tests", "bench")
    names = [p for root in roots for p in (ROOT / root).rglob("*") if p.suffix in {".py", ".cpp"}]
    assert not [p for p in names if pattern in p.name]


def test_private_names_of_torch_are_in_one_file() -> None:
    # `_op.py` reads the schema and the function of an op overload, which have no public name
    private = r"torch(?:\.\w+)*\._|from torch[\w.]* import _|forward_ad\._"
    for path in (ROOT / "src/metalcore").rglob("*.py"):
        if path.name != "_torch.py" and "bench" not in path.parts:
            text = path.read_text()
            assert not re.search(private, text.replace("torch.__", "")), path


def test_comments_follow_the_rules() -> None:
    for root in ("src", "csrc", "bench", "tests"):
        for path in (ROOT / root).rglob("*"):
            if path.suffix in {".py", ".cpp", ".h", ".metal"} and path != Path(__file__):
                text = path.read_text()
                assert not re.search(r"(?:#|//)\s*(?:FIXME|XXX)\b", text), path
                assert not re.search(r"(?:#|//)\s*TODO(?!\()", text), f"{path}: TODO(condition)"
