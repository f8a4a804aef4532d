"""Every word has an entry, and the pages in docs/reference say what the code says.

`make golden` rewrites the pages; read the difference before you commit it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import typer

from docs.generate.pages import pages, verdicts_page
from docs.generate.result_fields import records
from moediag.cli.app import whole
from moediag.cli.explain_word import lines
from moediag.diagnosis import LAW_NAMES, RULES
from moediag.errors import ExitCode, UsageError
from moediag.lab.scenario import catalogue
from moediag.reference import Lookup
from moediag.reference.finding_entries import detector_word
from moediag.reference.option_entries import commands
from moediag.result import Confidence, Effect, RunResult, Verdict
from moediag.result.answer_blocks import AnswerState
from tests.unit.diagnosis.example_detector import frozen_loss

FOLDER = Path(__file__).parents[3] / "docs" / "reference"
COMMAND = typer.main.get_command(whole())
KNOWN = Lookup(COMMAND)


def test_the_pages_are_current() -> None:
    made = pages(COMMAND)
    if os.environ.get("MOEDIAG_GOLDEN") == "write":
        for name, text in made.items():
            (FOLDER / name).write_text(text, encoding="utf-8")
    for name, text in made.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, f"{name}: run `make golden`"


def test_every_kind_has_all_its_words() -> None:
    words = KNOWN.words()
    assert words["verdict"] == [str(verdict) for verdict in Verdict]
    assert words["scenario"] == catalogue.names()
    assert tuple(words["law"]) == LAW_NAMES
    assert {int(code) for code in words["exit code"]} == {
        value for name, value in vars(ExitCode).items() if name.isupper()
    }
    declared = {o for command in COMMAND.commands.values() for p in command.params for o in p.opts}
    assert {o for o in declared if o.startswith("--")} - {"--help"} <= set(words["option"])


def test_every_word_is_found_and_fits_the_terminal() -> None:
    for kind, words in KNOWN.words().items():
        for word in words if kind != "scenario" else words[:3]:
            found = [entry for entry in KNOWN.find(word) if entry.kind == kind]
            assert found, word
            for line in lines(found[0], 80):
                assert len(line) <= 80 or line.startswith("    "), line
            assert len("\n".join(lines(found[0], 80)).split()) > 5


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("hang", "  Ranks wait in a collective that does not complete."),
        ("replicas-apart", "    moediag explain replica-divergence"),
        ("--quiescence", "quiescence"),
        ("expert-starvation", "    unfixed (unfixed)"),
        ("3", "3 (exit code)"),
        ("CULPRITS", "culprit (word)"),
        ("FIRST DIVERGENCE", "first divergence (word)"),
        ("-j", "-j (option)"),
    ],
)
def test_an_entry_says_what_the_code_says(word: str, line: str) -> None:
    (entry,) = KNOWN.find(word)
    assert line in "\n".join(lines(entry, 100))


def labels() -> set[str]:
    """The labels of all golden pages, and those in the source of pages."""
    root = FOLDER.parents[1]
    pages = [*(root / "tests" / "golden" / "pages").glob("*.txt")]
    found = {
        label
        for page in pages
        for label in re.findall(r"(?m)^ ([A-Z]+(?: [A-Z]+)?)(?= )", page.read_text("utf-8"))
    }
    for source in [*(root / "moediag").rglob("*.py")]:
        text = source.read_text(encoding="utf-8")
        found |= {*re.findall(r'(?:labelled|Row)\(\s*"([A-Z]+(?: [A-Z]+)?)"', text)}
    return found


def test_every_word_of_a_page_is_explained() -> None:
    found = labels()
    assert {"CULPRIT", "FIRST DIVERGENCE", "WHAT"} <= found and len(found) > 25
    said = {*Confidence, *AnswerState, *Effect, "correct", "unknown", "confidence", "behind"}
    names = {detector_word(detector.name) for detector in RULES}
    missing = []
    for word in {*found, *map(str, said), *names}:
        try:
            KNOWN.find(word)
        except UsageError:
            missing.append(word)
    assert missing == []


def test_every_option_is_explained_under_each_of_its_names() -> None:
    for command in commands(COMMAND):
        for parameter in command.parameters:
            for name in () if parameter.is_argument else parameter.names:
                assert KNOWN.find(name), name


def test_no_page_counts_one_in_the_plural() -> None:
    golden = FOLDER.parents[1] / "tests" / "golden" / "pages"
    for page in golden.glob("*"):
        text = page.read_text(encoding="utf-8")
        assert (
            re.findall(r"(?<![\w.,-])1 (?:trial|rank|cell|run|step|element|call|job)s\b", text)
            == []
        )


def test_an_unknown_word_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"did you mean .*hang"):
        KNOWN.find("hnag")


def test_every_option_with_a_value_says_what_the_value_looks_like() -> None:
    bare = [
        (command.path, parameter.names)
        for command in commands(COMMAND)
        for parameter in command.parameters
        if not parameter.meaning or (parameter.default and not parameter.metavar)
        if not parameter.is_argument
    ]
    assert bare == []


def test_the_verdicts_page_follows_the_rules() -> None:
    assert "| 1 | `wrong-weights` | The loss is exactly the same" in verdicts_page((frozen_loss,))


def test_every_field_of_the_result_is_listed() -> None:
    whole = records()[0]
    assert whole.name == "RunResult"
    assert [field.name for field in whole.fields] == list(RunResult.__dataclass_fields__)
    assert all(field.type for record in records() for field in record.fields)
