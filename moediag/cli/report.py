"""`moediag report`: parse, call, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moediag import extension
from moediag.cli import options as o
from moediag.errors import UsageError
from moediag.report import stderr, stdout


@o.with_options
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run directories.")],
    html: o.Html = None,
    markdown: Path | None = None,
    for_: str = "",
    junit: o.Junit = None,
    trace: o.Trace = None,
    short: bool = False,
    details: o.Details = False,
    no_color: o.NoColor = False,
) -> None:
    """Show finished runs again, or write them to files.

    --markdown of one failed run is a draft bug report with a program that reproduces it; nothing is
    filed.

    Options:
    --markdown FILE: Write a draft bug report; tables if several runs, or none, failed.
    --for PROJECT: Use the bug template of transformers, accelerate, pytorch or torchtitan; or write
        tables.  [default: the project that the scenario names]
    --short: Print the answer alone as plain text, for a chat.
    """
    from moediag.report import consoles, terminal, views

    if for_ and markdown is None:
        raise UsageError(f"--for {for_} needs --markdown", "Add --markdown FILE.")
    loaded = [views.load(path) for path in runs]
    chosen = o.views(html=html, markdown=markdown, junit=junit, trace=trace)
    results = [result for result, _ in loaded]
    made: dict[str, str] = {}
    if for_:
        extension.require(f"--for {for_}")
    if markdown is not None and not extension.missing():
        draft = extension.provided("draft")(loaded, for_, stderr.line)
        if draft is not None:
            made["markdown"] = draft.text
            beside = draft.attachment
            if beside is not None and markdown != Path("-"):
                told = views.put(markdown.with_name(beside.name), beside.text, "--markdown")
                stderr.line(f"{told}, to attach")
            stderr.line(f"a draft for {draft.repository}; nothing is filed")
    for told in views.write(results, chosen, lambda: views.evidence_of(loaded), made):
        stderr.line(told)
    if short:
        for result, _ in loaded:
            stdout.write(terminal.short(result))
    elif not chosen:
        for result, folder in loaded:
            terminal.render(result, consoles.output(no_color), views.short(folder), details)
