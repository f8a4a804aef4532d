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

from moediag.cli.app import app
from moediag.errors import ExitCode

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
PAGES += [ROOT / "reports" / name for name in ("compatibility.md", "accuracy.md", "load-cost.md")]
COMMAND = typer.main.get_command(app)


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
    parse(shlex.split(example.split(" > ")[0])[1:])


@pytest.mark.parametrize("line", documented())
def test_every_documented_command_line_parses(line: str) -> None:
    with contextlib.suppress(typer.Exit):  # --help
        parse(shlex.split(line.split(" > ")[0].split(" | ")[0])[1:])


@pytest.mark.parametrize("line", ["moediag show", "moediag run x --no-such-option", "moediag frob"])
def test_a_wrong_command_line_does_not_parse(line: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|missing|required") as caught:
        parse(shlex.split(line)[1:])
    assert "UsageError" in [kind.__name__ for kind in type(caught.value).__mro__]


def test_every_exit_code_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    codes = {value for name, value in vars(ExitCode).items() if name.isupper()}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} == codes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_has_a_target(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = [t for t in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in t]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_make_target_named_in_a_document_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"(?:`|^\$ )make ([a-z]+)", text, re.MULTILINE)) <= targets


def missing_modules(text: str) -> list[str]:
    """Returns the module paths in backticks that no file of the repository ends with."""
    files = [
        f"/{path.relative_to(ROOT).as_posix()}"
        for top in ("moediag", "tests", "bench")
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
    text = "see `rules/facts.py`, `facts.py`, `cts.py` and `moediag/no_such.py`"
    assert missing_modules(text) == ["cts.py", "moediag/no_such.py"]


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
    unlisted = {page for page in pages if f"({page})" not in index} - {"README.md"}
    assert unlisted == {f"explanation/design/{page.name}" for page in design.glob("[!R]*.md")}
    assert all(f"({Path(page).name})" in notes for page in unlisted)
