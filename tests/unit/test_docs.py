"""The documents match the program: every command is documented, every documented command line
parses, and every link, module path and make target in a document exists."""

import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from moediag.cli.app import whole

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
_REPORTS = "accuracy bisect compatibility growth laws load-cost torch-releases verify"
PAGES += [ROOT / "reports" / f"{name}.md" for name in _REPORTS.split()]
PAGES += sorted((ROOT / "reports" / "findings").glob("*.md"))
PAGES += [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")]
# The README is also the long description on a package index, so its links are absolute.
HOME = "https://github.com/moediag/moediag/blob/main/"
RAW = "https://raw.githubusercontent.com/moediag/moediag/main/"
COMMAND = typer.main.get_command(whole())


def commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields every command below ``group`` with its path."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)
        else:
            yield (*path, name), command


def documented() -> list[str]:
    """Returns every `moediag …` in backticks or in a console block of the documents, without
    mere names of commands (`moediag run`)."""
    found: dict[str, None] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for line in re.findall(r"`(moediag [^`\n]+)`", text):
            found.setdefault(line)
        for block in re.findall(r"```(?:console|sh|bash)\n(.*?)```", text, re.DOTALL):
            joined = block.replace("\\\n", " ")
            for line in re.findall(r"^(?:\$ )?(?:\.venv/bin/)?(moediag .+)$", joined, re.MULTILINE):
                found.setdefault(line.split("  #")[0].strip())
    return [line for line in found if not re.fullmatch(r"moediag [a-z ]+", line) or _whole(line)]


def _whole(line: str) -> bool:
    """Whether a line of bare words is a complete command line: its command needs no argument."""
    words = tuple(line.split()[1:])
    needed = {path: any(p.required for p in command.params) for path, command in commands(COMMAND)}
    return words in needed and not needed[words]


def parse(arguments: list[str]) -> None:
    """Parses a command line without running it; raises the parser's error, or typer.Exit for
    ``--help``."""
    command, context = COMMAND, COMMAND.make_context("moediag", list(arguments))
    rest = [*context._protected_args, *context.args]
    while hasattr(command, "commands") and rest:
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
        rest = [*context._protected_args, *context.args] if hasattr(command, "commands") else []


@pytest.mark.parametrize("path", [path for path, _ in commands(COMMAND)], ids=" ".join)
def test_every_command_is_documented(path: tuple[str, ...]) -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert re.search(rf"\bmoediag {' '.join(path)}\b", text)


@pytest.mark.parametrize("path", [path for path, _ in commands(COMMAND)], ids=" ".join)
def test_every_help_text_has_an_example_that_parses(path: tuple[str, ...]) -> None:
    command = dict(commands(COMMAND))[path]
    assert command.help
    example = str(command.epilog).removeprefix("Example: ")
    assert example.startswith(f"moediag {' '.join(path)}")
    parse(shlex.split(re.split(r" >>? ", example)[0])[1:])


@pytest.mark.parametrize("line", documented())
def test_every_documented_command_line_parses(line: str) -> None:
    with contextlib.suppress(typer.Exit):  # --help
        parse(shlex.split(re.split(r" >>? | \| ", line)[0])[1:])


@pytest.mark.parametrize("line", ["moediag show", "moediag run x --no-such-option", "moediag frob"])
def test_a_wrong_command_line_does_not_parse(line: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|missing|required") as caught:
        parse(shlex.split(line)[1:])
    assert "UsageError" in [kind.__name__ for kind in type(caught.value).__mro__]


def broken_links(page: Path, text: str) -> list[str]:
    """Returns the links of ``text`` to a file or a heading that does not exist."""
    return [
        link
        for link in re.findall(r"\]\(([^)\s]+)\)", text)
        if (target := _target(page, link)) is not None and not _exists(*target)
    ]


def _target(page: Path, link: str) -> tuple[Path, str] | None:
    """The file and the heading that a link leads to; None if it leaves the repository."""
    for home in (HOME, RAW):
        if link.startswith(home):
            path, _, heading = link.removeprefix(home).partition("#")
            return ROOT / path, heading
    if "://" in link:
        return None
    path, _, heading = link.partition("#")
    return (page.parent / path if path else page), heading


def _exists(file: Path, heading: str) -> bool:
    if not file.exists() or not heading:
        return file.exists()
    text = re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return heading in slugs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_a_target(page: Path) -> None:
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def test_a_broken_link_is_found() -> None:
    page = ROOT / "docs" / "README.md"
    good = "[a](howto/watch.md#slurm) [b](#start-here) [c](https://example.org/x)"
    bad = f"[a](howto/no.md) [b](howto/watch.md#no) [c](#no) [d]({HOME}docs/no.md)"
    assert broken_links(page, good) == []
    assert len(broken_links(page, bad)) == 4


def test_every_make_target_named_in_a_document_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"(?:`|^\$ )make ([a-z]+)", text, re.MULTILINE)) <= targets


def missing_modules(text: str) -> list[str]:
    """Returns the module paths in backticks that no file of the repository ends with."""
    files = [
        f"/{path.relative_to(ROOT).as_posix()}"
        for top in ("moediag", "scenarios", "tests", "bench")
        for path in (ROOT / top).rglob("*.py")
    ]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    prose = re.sub(r"^ *File `.+?`:", "", prose, flags=re.MULTILINE)  # files that a reader writes
    named = dict.fromkeys(re.findall(r"`([\w/-]+\.py)`", prose))
    return [name for name in named if not any(file.endswith(f"/{name}") for file in files)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_module_path_in_a_document_exists(page: Path) -> None:
    assert missing_modules(page.read_text(encoding="utf-8")) == []


def test_a_module_path_that_does_not_exist_is_found() -> None:
    text = "see `rules/failed.py`, `failed.py`, `led.py` and `moediag/no_such.py`"
    assert missing_modules(text) == ["led.py", "moediag/no_such.py"]


def test_every_package_is_in_the_architecture_page() -> None:
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "moediag").glob("*/__init__.py")}
    assert {name for name in packages if f"| `{name}/` |" not in text} == set()


def test_every_page_is_in_the_index() -> None:
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text(encoding="utf-8")
    design = docs / "explanation" / "design"
    notes = (design / "README.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(docs)) for page in docs.glob("**/*.md")}
    unlisted = {page for page in pages if f"({page}" not in index} - {"README.md"}
    assert unlisted == {f"explanation/design/{page.name}" for page in design.glob("[!R]*.md")}
    assert all(f"({Path(page).name})" in notes for page in unlisted)


def test_the_tutorial_and_its_picture_name_the_lines_of_its_program() -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"File `train.py`:\n\n```python\n(.*?)```", page, re.DOTALL)
    lines = program.splitlines()
    assert "dist.all_reduce(" in lines[10 - 1]
    assert lines[29 - 1].strip() == "if rank == 0:"
    assert "dist.barrier()" in lines[31 - 1]
    for name in ("attach", "watch"):
        picture = (ROOT / "docs" / "assets" / f"{name}.svg").read_text(encoding="utf-8")
        for text in ("train.py:10", "train.py:29", "train.py:31"):
            assert text in page and text in picture
    assert lines[26 - 1].strip() == "optimizer.step()"
