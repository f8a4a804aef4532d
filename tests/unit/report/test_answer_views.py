"""An answer in every view: its state's word, its exit code, its blocks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moediag.errors import ExitCode
from moediag.report import answer_views
from moediag.report.text_layout import plain
from moediag.result import Table
from moediag.result.answer_blocks import Answer, AnswerState, Case, Code, Row, Section

TABLE = Table("by release", ("lib", "x | y"), (("1.0", 2.5), ("1.1", None)))
FAILS = Section(
    (Row("FAILS", "call 6 <b>", "bad"), Row("", "and more"), "A sentence.", TABLE), "What fails"
)
LONG = Section((Code("$ moediag run x", "console"),), "Details", brief=(Row("see", "page"),))
HIDDEN = Section((TABLE,), "Everything", brief=())
EMPTY = Section((), "Nothing here")


def answer(state: AnswerState = AnswerState.FAILURE, conclusion: str = "", *cases: Case) -> Answer:
    return Answer(
        "check", "Model on dp=4", state, conclusion, (FAILS, LONG, HIDDEN, EMPTY),
        (Row("NEXT", "fix it"),), cases, {"schema_version": 1, "error": float("nan")},
    )  # fmt: skip


def terminal(one: Answer, width: int = 80) -> str:
    return "\n".join(plain(line) for line in answer_views.lines(one, width))


def test_the_answer_is_last_and_short_except_what_to_type() -> None:
    rows = (Row("WHY", "word " * 60), Row("NEXT", "moediag run " + "x " * 100))
    lines = terminal(dataclasses.replace(answer(), rows=rows)).splitlines()
    why = next(n for n, line in enumerate(lines) if line.startswith(" WHY"))
    assert lines[why - 1] == " CHECK    failure found"
    assert lines[why + 1].endswith(" …") and len(lines[why + 1]) <= 80
    assert lines[why + 2].startswith(" NEXT") and len(lines) > why + 4


VIEWS: dict[str, Callable[[Answer], str]] = {
    "terminal": terminal,
    "markdown": answer_views.markdown,
    "html": answer_views.html,
    "junit": answer_views.junit,
    "json": lambda one: json.dumps(answer_views.data(one)),
}


@pytest.mark.parametrize("conclusion", ["", "12 cells"])
@pytest.mark.parametrize("view", ["terminal", "markdown", "html", "json"])
@pytest.mark.parametrize("state", AnswerState)
def test_every_view_shows_the_word_of_the_state_and_no_other(
    state: AnswerState, view: str, conclusion: str
) -> None:
    shown = VIEWS[view](answer(state, conclusion))
    found = set()
    for word in sorted(AnswerState, key=len, reverse=True):  # "no failure found" before its end
        if word in shown:
            found.add(word)
            shown = shown.replace(word, "")
    assert found == {state}


@pytest.mark.parametrize("state", AnswerState)
def test_only_what_is_answered_is_green(state: AnswerState) -> None:
    one = answer(state)
    green = one.exit_code == ExitCode.OK
    assert (state.style == "good") is green and ("✅" in answer_views.markdown(one)) is green
    assert json.loads(json.dumps(answer_views.data(one)))["exit_code"] == one.exit_code
    suite = ElementTree.fromstring(answer_views.junit(one))[0]
    red = int(one.exit_code == ExitCode.FAILURE_FOUND)
    assert (suite.attrib["failures"], suite.attrib["errors"]) == (str(red), str(1 - green - red))
    assert [child.attrib["type"] for child in suite[0]] == ([] if green else [state])


def test_what_is_not_known_has_an_exit_code_of_its_own() -> None:
    assert AnswerState.INCONCLUSIVE.exit_code == ExitCode.INCONCLUSIVE
    assert AnswerState.CANNOT_RUN.exit_code == ExitCode.CANNOT_RUN_HERE
    assert AnswerState.INCONCLUSIVE.style == AnswerState.CANNOT_RUN.style == "doubt"


def test_a_terminal_shows_the_answer_last_and_long_sections_in_short() -> None:
    assert terminal(answer(conclusion="the ranks diverge"), 60).splitlines() == [
        " see      page",
        "",
        " FAILS    call 6 <b>",
        "          and more",
        " A sentence.",
        " TABLE    by release",
        "          lib  x | y",
        "          ---  -----",
        "          1.0    2.5",
        "          1.1      -",
        "",
        " CHECK    failure found: the ranks diverge",
        " NEXT     fix it",
    ]


def test_markdown_has_everything_and_escapes_it() -> None:
    text = answer_views.markdown(answer(), level=3)
    head = "### Model on dp=4\n\n❌ **failure found**\n\n- **NEXT**: fix it\n\n#### What fails\n\n"
    assert text.startswith(head)
    assert "- **FAILS**: call 6 &lt;b&gt;\n  - and more\n\nA sentence.\n\n**by release**\n" in text
    assert "```console\n$ moediag run x\n```" in text and r"x \| y" in text
    assert "Nothing here" not in text
    assert text.index("#### Details") < text.index("#### Everything")


def test_a_name_that_is_no_text_is_shown() -> None:
    odd = dataclasses.replace(answer(), title="a\udc80")  # a file of another encoding
    text = answer_views.markdown(odd)
    assert text.encode() and "a\ufffd" in text


def test_markdown_stays_below_its_limit() -> None:
    whole = answer_views.markdown(answer())
    for limit in range(300, len(whole.encode()), 20):
        short = answer_views.markdown(answer(), limit)
        assert len(short.encode()) <= limit and short.endswith(answer_views._CUT)
        assert "**failure found**" in short


def test_html_escapes_and_has_everything() -> None:
    page = answer_views.html(answer())
    assert "call 6 &lt;b&gt;" in page and "<b>" not in page and "Nothing here" not in page
    for text in ("What fails", "A sentence.", "$ moediag run x", "x | y", "fix it"):
        assert text in page
    told = dataclasses.replace(answer(), rows=(Row("details", "--details prints them"),))
    assert "--details" in terminal(told)
    assert "--details" not in answer_views.html(told) + answer_views.junit(told)


def test_cases_have_suites_and_what_does_not_apply_is_skipped() -> None:
    states = (AnswerState.AS_EXPECTED, AnswerState.FAILURE, AnswerState.INCONCLUSIVE, None)
    cases = [Case(f"c{i}", "s", state, "why", suite="pinned") for i, state in enumerate(states)]
    own, suite = ElementTree.fromstring(
        answer_views.junit(answer(AnswerState.ANSWERED, "", *cases))
    )
    assert own.attrib["name"] == "Model on dp=4" and suite.attrib["name"] == "pinned"
    kinds = [[child.tag for child in case] for case in suite]
    assert kinds == [[], ["failure"], ["error"], ["skipped"]]
    assert [suite.attrib[k] for k in ("tests", "failures", "errors", "skipped")] == list("4111")


def test_files_are_written_beside_the_page_and_the_exit_code_is_returned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = {kind: tmp_path / kind for kind in ("html", "markdown", "junit")}
    code = answer_views.show(answer(), tmp_path / "hunt.md", False, True, wanted)
    told = capsys.readouterr()
    assert code == ExitCode.FAILURE_FOUND
    assert "CHECK    failure found\n" in told.out and "REPORT" in told.out
    assert told.err.splitlines() == [f"wrote {path}" for path in wanted.values()]
    for kind, path in wanted.items():
        assert path.read_text(encoding="utf-8") == answer_views.RENDERERS[kind](answer())


def test_a_format_on_stdout_is_alone_there(capsys: pytest.CaptureFixture[str]) -> None:
    answer_views.show(answer(), Path("x"), False, True, {"junit": Path("-")})
    assert capsys.readouterr().out == answer_views.junit(answer())


def test_json_is_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    answer_views.show(answer(), Path("x"), True, True, {})
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1, "error": "nan", "state": "failure found", "exit_code": 1,
    }  # fmt: skip
