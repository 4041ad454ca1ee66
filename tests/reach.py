# SPDX-License-Identifier: MIT
"""What a change reaches: prints the test files that `make` runs.

The layout decides: a file named after an op, `<family>/<op>.*` under any root, reaches the tests of
that op, and of the ops whose files name it. Where these are many, one op per family
stands for all. Unit tests run with every change.
"""

import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOTS = ("src/metalcore/ops", "src/metalcore/metal", "csrc/cpu", "bench", "tests")
CODE = {".py", ".h", ".cpp", ".metal"}
MOST = 6
EXAMPLES = {"tests/linalg/test_qr.py", "tests/train/test_rms_norm.py"}
# longer than the others together: they run where they are reached, and with `make test`
NO_UNIT_TESTS = {"tests/test_metal_kernels.py", "tests/test_docs.py"}
FOLDERS = {
    "src/metalcore/patch": {"tests/patch"},
    "src/metalcore/gguf": {"tests/gguf"},
    "src/metalcore/hf.py": {"tests/gguf/test_quantize.py"},
    "src/metalcore/checkpoints.py": {"tests/gguf/test_checkpoints.py"},
    "src/metalcore/_quantized_layers.py": {"tests/gguf/test_layers.py"},
    "src/mslsim": {
        f"tests/mslsim/test_{name}.py"
        for name in (
            "api",
            "cache",
            "kernels",
            "profile",
            "signature",
            "time_model",
            "uninitialized",
        )
    },
    "docs": {"tests/test_docs.py"},
    "README.md": {"tests/test_docs.py"},
    "CONTRIBUTING.md": {"tests/test_docs.py"},
}


def reached_by(changed: Iterable[str]) -> list[str]:
    """The tests that these files reach, all of them as paths from the root."""
    found = {str(p.relative_to(ROOT)) for p in ROOT.glob("tests/test_*.py")} - NO_UNIT_TESTS
    for file in map(Path, changed):
        found |= _of_folder(file) or _of_ops(file)
    return sorted(found)


def _of_folder(file: Path) -> set[str]:
    return next((tests for f, tests in FOLDERS.items() if file.is_relative_to(f)), set())


def _of_ops(file: Path) -> set[str]:
    """The tests of the op that the file is named after, and of its users at any depth."""
    reached, todo = {file}, [file]
    while todo:
        users = _users().get(_name(todo.pop()), set()) - reached
        reached |= users
        todo += users
    tests = {test for one in reached for test in _of_op(one)}
    if file.suffix not in CODE or 0 < len(tests) <= MOST:
        return tests
    return _of_op(file) | EXAMPLES


def _of_op(file: Path) -> set[str]:
    inside = [file.relative_to(root) for root in ROOTS if file.is_relative_to(root)]
    tests = {Path("tests") / i.parent / f"test_{i.stem}.py" for i in inside if len(i.parts) == 2}
    tests |= {file} if file.name.startswith("test_") else set()
    return {str(test) for test in tests if (ROOT / test).exists()}


def _name(file: Path) -> str:
    """What other files call this one by."""
    return file.stem if file.suffix == ".py" else file.name


@cache
def _users() -> dict[str, set[Path]]:
    """The files of ops that include a header, import a module or launch a kernel, by its name."""
    found: dict[str, set[Path]] = {}
    files = [p for root in ROOTS for p in (ROOT / root).glob("**/*.*") if p.suffix in CODE]
    for path in files:
        text = path.read_text()
        named = re.findall(r'"(?:[^"\n]*/)?(\w+\.(?:h|metal))"', text)
        imports = re.findall(r"^(?:from|import) (.*)", text, re.MULTILINE)
        modules = re.findall(r"\w+", " ".join(imports)) if path.suffix == ".py" else []
        for name in (*named, *modules):
            found.setdefault(name, set()).add(path.relative_to(ROOT))
    return found


def changed_files() -> list[str]:
    """Files that differ from the main branch, or else those of the last commit."""

    def git(*command: str) -> list[str]:
        found = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        return found.stdout.splitlines()

    base = git("merge-base", "HEAD", "origin/main") or ["HEAD"]
    changed = git("diff", "--name-only", *base) + git("ls-files", "-o", "--exclude-standard")
    return changed or git("diff", "--name-only", "HEAD~1")


if __name__ == "__main__":
    print("\n".join(reached_by(changed_files())))
