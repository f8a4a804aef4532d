"""Checks that no view of a result passes on what its reader would obey."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path

from rich.console import Console

from bench.endurance.damage import EVIL
from moediag.report import answer_views, html, json_view, junit, markdown, terminal
from moediag.report.printable import in_json, printable
from moediag.result import RunResult
from moediag.result.answer_blocks import Answer

_CODE = re.compile(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)")  # a span of code, which is shown as it is
CONTROLS = re.compile(
    r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


class Unescaped(Exception):
    """A view passed on what its reader would obey."""


class _Tags(HTMLParser):
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "img") or any(name.startswith("on") for name, _ in attrs):
            raise Unescaped(f"html: <{tag}>")


def no_number(text: str) -> None:
    raise Unescaped(f"{text} in JSON")


def show(result: RunResult) -> None:
    """Renders every view. Raises Unescaped."""
    stream = io.StringIO()
    terminal.render(result, Console(file=stream, width=80, no_color=True), Path(f"a{EVIL}"))
    data = json_view.render(result)
    page, text = html.render([result]), printable(markdown.render([result]))
    _check(page, text, data, (stream.getvalue(), junit.render([result])))


def show_answer(answer: Answer) -> None:
    """The same of the answer of a command of the laboratory."""
    lines = "\n".join(printable("".join(text for text, _ in line))
                      for line in answer_views.lines(answer, 80))  # fmt: skip
    data = in_json(json.dumps(answer_views.data(answer), ensure_ascii=False, default=str))
    page, text = answer_views.html(answer), answer_views.markdown(answer)
    _check(page, text, data, (lines, answer_views.junit(answer)))


def _check(page: str, text: str, data: str, others: Iterable[str]) -> None:
    json.loads(data, parse_constant=no_number)
    for view in (page, text, data, *others):
        if found := CONTROLS.search(view):
            raise Unescaped(
                f"{found[0]!r} after {view[max(0, found.start() - 60) : found.start()]!r}"
            )
    _Tags().feed(page)
    fence = ""
    for line in text.splitlines():
        mark = re.match(r"`{3,}", line)
        if fence or mark:
            fence = "" if fence and line == fence else fence or (mark[0] if mark else "")
        elif re.search("<script|<img", _CODE.sub("", line)):
            raise Unescaped(f"markdown: {line[:200]}")
