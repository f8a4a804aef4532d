"""Settings: an option comes first, then its variable, then the file; a mistake has one message."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from docs.generate.configuration_page import OF_COMMAND, VARIABLES
from moediag.cli import app, main
from moediag.configuration import SETTINGS, read
from moediag.errors import UsageError

GROUP = typer.main.get_command(app.whole())
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The folder `tmp_path/inside` is the working directory; returns the options of `watch`."""
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    found: dict[str, Any] = {}
    monkeypatch.setattr(
        "moediag.pipeline.watch.check_on_hang", lambda choice: found.update(on_hang=choice)
    )

    def options(**values: Any) -> Any:
        found.update(values)
        raise UsageError("--laws-every 3: stopped here")

    monkeypatch.setattr("moediag.launch.watched.JobOptions", options)
    return found


def watch(*words: str) -> int:
    return main(["watch", *words, "--", "true"])


def test_option_then_variable_then_file_then_default(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch()
    assert (asked["on_hang"], asked["laws_every"]) == ("report", None)
    text = "[tool.moediag]\nlaws = true\n[tool.moediag.watch]\non_hang = 'abort'\n"
    (tmp_path / "pyproject.toml").write_text(text)
    watch()
    assert (asked["on_hang"], asked["laws_every"]) == ("abort", 0)
    monkeypatch.setenv("MOEDIAG_WATCH_ON_HANG", "continue")
    monkeypatch.setenv("MOEDIAG_WATCH_LAWS", "0")
    watch()
    assert (asked["on_hang"], asked["laws_every"]) == ("continue", None)
    watch("--on-hang", "report", "--laws")
    assert (asked["on_hang"], asked["laws_every"]) == ("report", 0)


def test_the_nearest_file_counts(tmp_path: Path) -> None:
    (tmp_path / "moediag.toml").write_text("patience = 5")
    inside = tmp_path / "a"
    inside.mkdir()
    (inside / "pyproject.toml").write_text("[tool.other]")  # says nothing about moediag
    assert read(inside, []).values == {"patience": 5}
    (inside / "pyproject.toml").write_text("[tool.moediag]\npatience = 6")
    assert read(inside, []).values == {"patience": 6}
    (inside / "moediag.toml").symlink_to("/dev/zero")  # is no file
    assert read(inside, []).values == {"patience": 6}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "patience = 0.5",
            "pyproject.toml:3: tool.moediag.patience: invalid value for '--patience'",
        ),
        ("patience = 'a'", "pyproject.toml:3: tool.moediag.patience = 'a' is not a number"),
        ("patience = true", "pyproject.toml:3: tool.moediag.patience = true is not a number"),
        ("laws = 1", "pyproject.toml:3: tool.moediag.laws = 1 is not true or false"),
        ("on-hang = 3", "pyproject.toml:3: tool.moediag.on-hang = 3 is not a text in quotes"),
        ("laws-every = 3", "pyproject.toml:3: tool.moediag.laws-every: --laws-every 3: stopped"),
        ("patince = 1", "pyproject.toml:3: tool.moediag.patince: patince is not a setting"),
        ("out = 'x'", "pyproject.toml:3: tool.moediag.out: out is not a setting"),
        ("wach.laws = true", "tool.moediag.wach.laws: wach is not a command"),
        ("laws = 1 2", "pyproject.toml: not TOML: "),
        (f"allow = {'[' * 3000}", "pyproject.toml: not TOML: "),
        (f"patience = {'9' * 5000}", "pyproject.toml: not TOML: "),
    ],
)
def test_a_mistake_names_file_line_and_field(
    line: str, message: str, asked: dict[str, Any], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "pyproject.toml").write_text(f"\n[tool.moediag]\n{line}\n")
    assert watch() == 2
    (first, *_) = capsys.readouterr().err.splitlines()
    assert message in first and first.startswith(f"error: {tmp_path}")


def test_a_wrong_variable_is_named(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOEDIAG_WATCH_PATIENCE", "0")
    assert watch() == 2
    assert capsys.readouterr().err.startswith("error: MOEDIAG_WATCH_PATIENCE: invalid value")
    assert watch("--patience", "0") == 2
    assert capsys.readouterr().err.startswith("error: invalid value for '--patience'")


def test_every_setting_is_an_option_and_every_variable_of_the_docs_has_a_row() -> None:
    declared = {o for c in GROUP.commands.values() for p in c.params for o in p.opts}
    assert {f"--{name}" for name in SETTINGS} <= declared
    pages = (page.read_text(encoding="utf-8") for page in (DOCS / "howto").glob("*.md"))
    named = {name for text in pages for name in re.findall(r"MOEDIAG_[A-Z_]*[A-Z]", text)}
    assert named <= {*VARIABLES, *OF_COMMAND}
