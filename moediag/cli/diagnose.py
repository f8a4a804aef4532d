"""`moediag diagnose`: parse, call, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moediag.cli import options as o
from moediag.report import stderr, stdout


def diagnose(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH…", help="Runs, dumps, stacks, logs.")
    ],
    taken_at: o.TakenAt = "",
    html: o.Html = None,
    trace: o.Trace = None,
    as_json: o.Json = False,
    details: o.Details = False,
    no_color: o.NoColor = False,
) -> None:
    """Diagnose a run, a trial, or files that other tools left behind.

    Flight Recorder dumps, stacks of py-spy, pystack and gdb, reports of NCCL RAS, Horovod and
    torchfrtrace, torchrun's error files, logs, and archives that `moediag attach` collected are
    recognised by their content and read together as one job. --html and --trace are written in
    addition to the page, or instead of it if they go to stdout (-).
    """
    chosen = o.views(as_json, html=html, trace=trace)
    from moediag.pipeline.examine import examine
    from moediag.report import page, views

    found = examine(paths, o.moment(taken_at))
    for told in views.write([found.result], chosen, found.traced):
        stderr.line(told)
    if as_json:
        from moediag.report import json_view

        stdout.write(json_view.render(found.result))
    elif Path("-") not in chosen.values():
        from moediag.report import consoles, terminal

        terminal.render(found.result, consoles.output(no_color), details=details)
    raise typer.Exit(page.exit_code(found.result))
