# SPDX-License-Identifier: MIT
"""What README.md and docs/ print runs as printed, and what they promise is there.

A page is one program: its ```python blocks run in their order, in one namespace. A ```text block
right after one is what it prints. A comment `<!-- python ... -->` runs before them: it makes what a
reader has already, such as a model. Blocks that cannot run are ```py.
"""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import metalcore
import metalcore.cli
import mslsim.cli
from metalcore import _trace

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}

_BLOCK = re.compile(
    r"^(?:```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?"
    r"|<!-- python\n(?P<hidden>.*?)^-->)",
    re.DOTALL | re.MULTILINE,
)
RUNNING = [name for name, text in TEXTS.items() if _BLOCK.search(text)]


@pytest.fixture(autouse=True)
def _as_a_reader() -> Iterator[None]:
    """Nothing that the tests set up for themselves, and nothing left behind."""
    torch.use_deterministic_algorithms(False)
    threads = torch.get_num_threads()
    yield
    metalcore.disable_pytorch_overrides()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("page", RUNNING)
def test_code_runs_and_prints_what_is_shown(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("METALCORE_STRICT")
    monkeypatch.setattr(_trace, "left_to_compiler", set())  # of other tests in this process
    text = TEXTS[page]
    names: dict[str, object] = {"__name__": "page"}
    for block in sorted(_BLOCK.finditer(text), key=lambda block: block["hidden"] is None):
        part = "hidden" if block["hidden"] is not None else "code"
        line = text.count("\n", 0, block.start(part))
        code = compile("\n" * line + block[part], page, "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        if block["output"] is not None:
            assert _plain(printed.getvalue()) == _plain(block["output"]), f"{page}:{line}"


def _plain(text: str) -> list[str]:
    """Words alone: times and instruction sets are those of another machine."""
    text = re.sub(r"cpu:(?:avx512|avx2|baseline|neon)\b", "cpu:any", text)
    return re.sub(r"\b\d+\.\d{3}\b|[\u2500-\u257f]", " ", text).split()


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", TEXTS[page]):
        assert (ROOT / page).parent.joinpath(link).exists(), link


@pytest.mark.parametrize("page", TEXTS)
def test_make_targets_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([a-z][\w-]*)(?= |`|$)", TEXTS[page], re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", TEXTS)
def test_commands_take_the_options_that_are_shown(page: str) -> None:
    commands = {"metalcore": metalcore.cli.app, "mslsim": mslsim.cli.app}
    fences = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
    lines = [
        line
        for language, block in fences.findall(TEXTS[page])
        if language == "sh"
        for line in block.splitlines()
    ]
    lines += re.findall(r"`([^`\n]+)`", fences.sub("", TEXTS[page]))
    for line in lines:
        program, *words = shlex.split(line, comments=True) or [""]
        if program not in commands or not words:
            continue
        name = words.pop(0)
        # what `metalcore run` does with a model has options of its own
        name = "generate" if name == "run" and ".gguf" in "".join(words).lower() else name
        group: Any = typer.main.get_command(commands[program])
        assert name in group.commands, line
        options = {o for p in group.commands[name].params for o in (*p.opts, *p.secondary_opts)}
        options |= {"--help"}
        assert {word for word in words if word.startswith("-")} <= options, line


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    for page in PAGES:
        if page.parent == ROOT / "docs" and page.name != "README.md":
            assert f"]({page.name})" in index, page.name


def test_the_readme_is_short() -> None:
    assert len(TEXTS["README.md"].split()) <= 800
    first_screen = TEXTS["README.md"].splitlines()[:40]
    assert "Apple GPU" in "\n".join(first_screen[:10])
    assert "make demo" in "\n".join(first_screen)


def test_ci_is_the_test_command() -> None:
    assert "exec make test" in (ROOT / ".ci/run").read_text()
