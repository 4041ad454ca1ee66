# SPDX-License-Identifier: MIT
"""What mkdocs does not do by itself: pages from the root of the repository, a page of reference for
each stub, and links to files that are no pages."""

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src/metalcore"
# Files of the repository that are pages of the site.
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
# The families by what they are called in the reference; the stub of each tells its names.
FAMILIES = {
    "": "Models, overrides and tools",
    "linalg": "Linear algebra",
    "train": "Training",
    "attn": "Attention",
    "quant": "Weights in few bits",
    "xlstm": "xLSTM",
    "precise": "Extended precision",
}
_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """The reference, and the pages that nobody listed, are in the navigation."""
    reference = [{t: f"api/{n or 'metalcore'}.md"} for n, t in FAMILIES.items()]
    for section in config.nav:
        if section.get("Reference"):
            section["Reference"] = reference
    listed = set(re.findall(r"'([\w-]+\.md)'", str(config.nav)))
    others = sorted(p for p in Path(config.docs_dir).glob("*.md") if p.name not in listed)
    section = next(s["How to"] for s in config.nav if "How to" in s)
    section += [{p.stem.replace("-", " ").capitalize(): p.name} for p in others]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=_inside(text)))
    for name, title in FAMILIES.items():
        page = f"api/{name or 'metalcore'}.md"
        files.append(File.generated(config, page, content=reference(name, title)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links that leave docs/ lead to a page, or are names of files."""

    def target(match: re.Match[str]) -> str:
        label, link = match.groups()
        if not link.startswith("../"):
            return match[0]
        path, hash_, anchor = link.removeprefix("../").partition("#")
        if path in PAGES:
            return f"{label}({PAGES[path]}{hash_}{anchor})"
        return f"`{path}`"

    if page.url.startswith("api/"):
        return markdown
    return re.sub(r"\[([\w-]+)\.md\]", r"[\1]", _LINK.sub(target, markdown))


def reference(family: str, title: str) -> str:
    """The page of a family: every public name, with the docstring where it is defined."""
    names = exported(PACKAGE / family / "__init__.pyi")
    package = f"metalcore.{family}".rstrip(".")
    head = f"# {title}\n\nEverything here is in `{package}`"
    head += ".\n" if not family else ", and in `metalcore` itself.\n"
    return head + "".join(f"\n::: {module}.{name}\n" for name, module in sorted(names.items()))


def exported(stub: Path) -> dict[str, str]:
    """The names of a stub, and the modules that define them; modules themselves are none."""
    found = {}
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module != "metalcore":
            for alias in node.names:
                if alias.name != "*" and not (PACKAGE.parent / _path(node.module, alias)).exists():
                    found[alias.name] = node.module
    return found


def _path(module: str, alias: ast.alias) -> str:
    return f"{module}.{alias.name}".replace(".", "/")


def _inside(text: str) -> str:
    """A page of the root as one of docs/: its links are seen from there."""

    def target(match: re.Match[str]) -> str:
        label, link = match.groups()
        if link.startswith(("http", "#", "docs/")):
            return f"{label}({link.removeprefix('docs/')})"
        return f"{label}(../{link})"

    return _LINK.sub(target, text)
