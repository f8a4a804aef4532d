"""What `moediag verify` and `moediag resume` have in common: they run jobs and compare them."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moediag.errors import UsageError
from moediag.report import stderr, stdout

if TYPE_CHECKING:
    from moediag.pipeline.measured_jobs import Compared, MeasuringOptions


def words(option: str, given: str | None, advice: str) -> list[str]:
    """Returns the words of a command that an option was given; none if it was not given. Raises
    UsageError."""
    try:
        found = shlex.split(given) if given is not None else []
    except ValueError as error:
        raise UsageError(f"{option} {given!r}: {error}") from error
    if given is not None and not found:
        raise UsageError(f"{option} is empty", advice)
    return found


def run(
    compare: Callable[[MeasuringOptions], Compared],
    steps: int, out: Path | None, as_json: bool, details: bool, no_color: bool,
) -> typer.Exit:  # fmt: skip
    """Runs and compares, shows the page, and returns the exit."""
    from moediag.pipeline.measured_jobs import MeasuringOptions
    from moediag.report import consoles, json_view, terminal, views, watch_display

    with watch_display.view(no_color, 60.0, to_stderr=as_json) as view:
        done = compare(
            MeasuringOptions(
                steps=steps,
                out=out,
                stdout=view.job_stdout,
                stderr=view.job_stderr,
                on_progress=view.progress,
                tell=view.line,
            )
        )
    if as_json:
        stdout.write(json_view.render(done.result))
    else:
        terminal.render(done.result, consoles.output(no_color), views.short(done.folder), details)
        stderr.line(f"moediag: evidence in {views.short(done.folder)}")
    return typer.Exit(done.exit_code)
