"""`moediag doctor` in a terminal: one line per check, and what to type if something is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from moediag.report.terminal import WIDEST, show
from moediag.report.text_layout import Line, columns, indented, wrap

if TYPE_CHECKING:
    from rich.console import Console

    from moediag.doctor import Check

MARKS = {"ok": ("ok", "good"), "warn": ("warn", "doubt"), "fail": ("FAIL", "bad")}


def render(checks: Sequence[Check], console: Console) -> None:
    for line in lines(checks, min(console.width, WIDEST)):
        show(line, console)


def lines(checks: Sequence[Check], width: int) -> Iterator[Line]:
    """Yields the lines, ending with the overall answer."""
    cells = columns([[MARKS[check.status][0], check.name, ""] for check in checks])
    for check, (mark, name, _) in zip(checks, cells, strict=True):
        indent = len(mark) + len(name) + 5
        heads = [(f" {mark}  ", MARKS[check.status][1]), (f"{name}  ", "label")]
        for text in wrap(check.found, width - indent):
            yield (*heads, (text, "plain"))
            heads = [(" " * indent, "plain")]
        if check.advice:
            yield from indented(check.advice, width, indent, "doubt")
    failed = [check.name for check in checks if check.status == "fail"]
    if failed:
        yield ((f" moediag cannot run here: {', '.join(failed)}", "bad"),)
    else:
        yield ((" moediag can run here", "good"),)
