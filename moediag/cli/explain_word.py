"""`moediag explain`: parse, call, exit code."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from moediag.cli import options as o
from moediag.report import stdout

if TYPE_CHECKING:
    from moediag.reference import Entry

_WIDEST = 100


def explain(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORD",
            help="A verdict, law, scenario, option (without dashes), exit code or word of a page.",
            show_default=False,
        ),
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Explain a verdict, a law, a scenario, an option, an exit code or a word on a page.

    Without a word, list all of them.
    """
    from moediag.reference import Lookup

    known = Lookup(context.find_root().command)
    word = " ".join(words or ())
    if not word:
        if as_json:
            stdout.data({"words": known.words()})
            return
        for kind, words in known.words().items():
            stdout.line(f"{kind}s: {', '.join(words)}\n")
        return
    found = known.find(word)
    if as_json:
        stdout.data({"entries": [dataclasses.asdict(entry) for entry in found]})
        return
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    stdout.line("\n\n".join("\n".join(lines(entry, width)) for entry in found))


def lines(entry: Entry, width: int) -> Iterator[str]:
    """Yields an entry as text, no line longer than ``width`` unless it is an address or a command
    line."""
    from moediag.report.text_layout import wrap

    yield f"{entry.word} ({entry.kind})"
    for paragraph in entry.paragraphs:
        yield ""
        yield from (f"  {line}" for line in wrap(paragraph, width - 2))
    if entry.rows:
        yield from ("", f"  {entry.heading}:")
        for name, text in entry.rows:
            yield from (f"    {line}" for line in wrap(name, width - 4))
            yield from (f"      {line}" for line in wrap(text, width - 6))
    for heading, texts in (("Commands", entry.commands), ("Sources", entry.sources)):
        if texts:
            yield from ("", f"  {heading}:")
            yield from (f"    {text}" for text in texts)
