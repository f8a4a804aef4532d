"""The documentation site: `make docs`. Pages are read where they are, so that every link works in
the repository and on the site; the index decides what the navigation shows."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent

project = "moediag"
author = "The moediag developers"
version = release = re.findall(
    r'__version__ = "(.+)"', (ROOT / "moediag" / "__init__.py").read_text(encoding="utf-8")
)[0]

extensions = ["myst_parser"]
root_doc = "docs/README"
include_patterns = ["docs/**", "reports/**", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
include_patterns += ["CODE_OF_CONDUCT.md"]
# Not only to leave them out: what is excluded is not searched.
exclude_patterns = [
    path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in ("docs", "reports")
]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "moediag"
html_extra_path = ["site"]  # index.html, which leads to the index
html_copy_source = False
html_show_sphinx = False


def sections(text: str, page: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each heading of an index page with the pages that its tables link to."""
    for part in text.split("\n## ")[1:]:
        links = re.findall(r"\]\(([^)#:]+\.md)\)", part)
        folder = PurePosixPath(page).parent
        found = [_normal(folder / link) for link in links]
        yield part.partition("\n")[0], list(dict.fromkeys(found))


def _normal(path: PurePosixPath) -> str:
    """The path without ``..`` and suffix, from the root of the repository."""
    parts: list[str] = []
    for part in path.with_suffix("").parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/" + "/".join(parts)


def with_navigation(_app: object, page: str, source: list[str]) -> None:
    """Appends to an index what the navigation needs."""
    folder, _, name = page.rpartition("/")
    if name == "README" and page != root_doc and folder != "reports/findings":
        beside = sorted(path.stem for path in (ROOT / folder).glob("*.md"))
        source[0] += _toctree("", [f"/{folder}/{one}" for one in beside if one != name])
    if page == root_doc:
        for heading, pages in sections(source[0], page):
            source[0] += _toctree(heading, pages)


def _toctree(caption: str, pages: list[str]) -> str:
    lines = ["", "", "```{toctree}", ":hidden:", f":caption: {caption}" if caption else "", ""]
    return "\n".join([*lines, *dict.fromkeys(pages), "```", ""])


def setup(app: object) -> None:
    app.connect("source-read", with_navigation)  # type: ignore[attr-defined]


if __name__ == "__main__":  # prints the packages that the site needs, for `make docs`
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    line = re.findall(r"^docs = \[(.+)\]", text, re.MULTILINE)[0]
    sys.stdout.write("\n".join(re.findall(r'"([^"]+)"', line)) + "\n")
