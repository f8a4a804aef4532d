"""What a shell gets to complete, through the protocol of typer's scripts, and `moediag init`."""

from __future__ import annotations

from pathlib import Path

import pytest

from moediag.cli import main, tab_completion
from moediag.lab.cli import completions
from moediag.lab.families import FAMILIES
from moediag.lab.scenario import catalogue
from moediag.lab.scenario.load import load
from moediag.lab.scenario.plan import plan


def words(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """What bash gets for ``line``, split as bash does: "=" is a word."""
    typed = line.replace("=", " = ").replace("  ", " ").split(" ")
    monkeypatch.setenv(tab_completion.VARIABLE, "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(typed))
    monkeypatch.setenv("COMP_CWORD", str(len(typed) - 1))
    assert main([]) == 0
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("moediag bis", ["bisect"]),
        ("moediag run expert-starvation-hang", ["expert-starvation-hang"]),
        ("moediag run expert-starvation --variant zero", ["zero-fill"]),
        ("moediag matrix expert-starvation --family mixt", ["mixtral"]),
        ("moediag run expert-starvation --set model.family=mixt", ["mixtral"]),
        ("moediag run expert-starvation --launcher ", ["auto", "torchrun", "fork"]),
        ("moediag run no-such-scenario --variant z", []),
    ],
)
def test_bash_completes(
    line: str, expected: list[str],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert words(line, monkeypatch, capsys) == expected


def test_all_families_are_known_after_the_equals_sign(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "moediag run expert-starvation --set model.family="
    assert words(line, monkeypatch, capsys) == list(FAMILIES)


def test_scenario_files_are_completed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "mine.txt").touch()
    assert completions.scenarios("min") == ["mine.yaml"]
    assert completions.scenarios("./mi") == ["./mine.yaml"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert tab_completion.VARIABLE in capsys.readouterr().out


# -- init ------------------------------------------------------------------------------


def test_init_writes_a_scenario_that_loads(tmp_path: Path) -> None:
    file = tmp_path / "Mine_too.yaml"
    words = ["--from", "expert-starvation", "--set", "model.family=mixtral"]
    assert main(["init", str(file), *words]) == 0
    made, source = load(file), load(catalogue.find("expert-starvation"))
    assert (made.name, made.model.family) == ("mine-too", "mixtral")
    assert [*made.variants] == [*source.variants]
    planned = [[one.trial.variant for one in plan(s, 2, "cpu").trials] for s in (made, source)]
    assert planned[0] == planned[1]
    assert "batch:" not in file.read_text(), "defaults are not written"


def test_init_does_not_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("kept")
    assert main(["init", str(file)]) == 2
    assert "exists" in capsys.readouterr().err
    assert file.read_text() == "kept"


def test_init_asks_in_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"begin with": "expert-starvation", "title": "Mine", "stack.transformers": "4.57.6"}
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("typer.prompt", lambda what, default, **_: said.get(what, default))
    file = tmp_path / "mine.yaml"
    assert main(["init", str(file)]) == 0
    made = load(file)
    assert (made.title, made.stack["transformers"]) == ("Mine", "4.57.6")
