"""Text that others wrote, in every string of a result: no view passes on what a terminal, a browser
or markdown would act on."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from rich.console import Console

from moediag.cli import main
from moediag.report import html, json_view, junit, markdown, stderr, terminal, views
from moediag.report.printable import printable
from moediag.result import RunResult, read_result, wording

GOLDEN = Path(__file__).parents[2] / "golden" / "results"
RESULTS = [GOLDEN / f"{name}.json" for name in ("starvation", "tables", "hang")]
LINK = "\x1b]8;;http://x/\x1b\\"  # OSC 8
EVIL = f"\x1b[2J\x07{LINK}\r\x9b\u202e\udcff<script>alert(1)</script><!-- | `x` ~~~ ```"
CONTROLS = re.compile(
    r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def tainted(value: Any, by: str = EVIL) -> Any:
    """The same value with ``by`` at the end of each text that is not one of moediag's words."""
    if type(value) is str:
        return value + by if value else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {f.name for f in dataclasses.fields(value) if f.init}
        kept = {"backend", "kind", "role", "started"}
        return dataclasses.replace(
            value, **{name: tainted(getattr(value, name), by) for name in own - kept}
        )
    if isinstance(value, tuple | list):
        return type(value)(tainted(one, by) for one in value)
    if isinstance(value, dict | MappingProxyType):
        return {key: tainted(one, by) for key, one in value.items()}
    return value


@pytest.fixture(params=RESULTS, ids=lambda path: path.stem)
def result(request: pytest.FixtureRequest) -> RunResult:
    found: RunResult = tainted(read_result(request.param))
    return found


def in_terminal(result: RunResult) -> str:
    stream = io.StringIO()
    terminal.render(result, Console(file=stream, width=80, no_color=True), Path("a\x1b[2Jb"))
    return stream.getvalue()


def in_markdown(result: RunResult) -> str:
    return printable(markdown.render([result]))


@pytest.mark.parametrize(
    "view",
    [in_terminal, in_markdown, lambda r: html.render([r]), lambda r: junit.render([r])],
    ids=["terminal", "markdown", "html", "junit"],
)
def test_no_view_has_a_control_character(
    result: RunResult, view: Callable[[RunResult], str]
) -> None:
    found = CONTROLS.findall(view(result))
    assert not found, found[:3]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.comments: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)


def test_html_has_no_element_of_others(result: RunResult) -> None:
    page = Tags()
    page.feed(html.render([result]))
    assert "script" not in page.tags
    assert not page.comments


def test_markdown_tables_keep_their_columns_and_no_tag_is_left(result: RunResult) -> None:
    text = in_markdown(result)
    fence, width = "", 0
    for line in text.splitlines():
        mark = re.match(r"`{3,}", line)
        if fence or mark:
            fence = "" if fence and line == fence else fence or (mark[0] if mark else "")
            continue
        assert "<script" not in line, line
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not (cells and width) or cells == width, line
        width = cells
    assert not fence


def test_a_terminal_keeps_its_width(result: RunResult) -> None:
    """Replacing a control character does not change the length."""
    assert max(map(len, in_terminal(result).splitlines())) <= 80


def test_json_is_exact(result: RunResult) -> None:
    assert "\x1b" not in json_view.render(result)


@pytest.mark.parametrize("text", ["a", "", "ü 漢 😀 → \t\n", "{4..5}"])
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert printable(text) == text


def test_controls_become_visible() -> None:
    assert printable("\x1b[2J") == "\u241b[2J"
    assert len(printable(EVIL)) == len(EVIL)
    assert not CONTROLS.search(printable("".join(map(chr, range(0x2100)))))


def test_errors_name_files_without_their_controls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(tmp_path / "a\x1b[2J\u202e")]) == 2
    told = capsys.readouterr().err
    assert "a\u241b[2J\ufffd does not exist" in told
    stderr.line(LINK)
    assert "\x1b" not in capsys.readouterr().err


def test_a_file_name_that_is_no_text_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run\udcff"
    folder.mkdir()
    (folder / "rank_0.log").write_text("[rank0]:[E101 00:00:00] NCCL WARN x\n")
    main(["diagnose", str(folder)])
    assert "run\ufffd" in capsys.readouterr().out
    main(["diagnose", "--json", str(folder)])
    assert "run\\udcff" in capsys.readouterr().out


def test_code_holds_backticks() -> None:
    assert wording.code("a") == "`a`"
    assert wording.code("a ``b` c") == "``` a ``b` c ```"


def test_markdown_files_are_printable(tmp_path: Path, result: RunResult) -> None:
    views.write([result], {"markdown": tmp_path / "page.md"}, dict)
    assert not CONTROLS.search((tmp_path / "page.md").read_text(encoding="utf-8"))
