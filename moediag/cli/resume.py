"""`moediag resume`: parse, call, exit code."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from moediag.cli import options as o
from moediag.report import stderr, stdout


def resume(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- CMD…", help="Your training command, which saves checkpoints."),
    ],
    resumed: Annotated[
        str | None,
        typer.Option(
            metavar="'CMD'",
            help="The command that resumes. Default: your command again; a Trainer of "
            "transformers is then told the checkpoint.",
        ),
    ] = None,
    interrupted: Annotated[
        str | None,
        typer.Option(
            metavar="'CMD'",
            help="A command that saves and ends. Default: your command, ended after its first "
            "checkpoint.",
        ),
    ] = None,
    after: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Use the first checkpoint saved after N steps."),
    ] = 1,
    steps: Annotated[
        int, typer.Option(min=1, metavar="K", help="Compare the first K steps after the save.")
    ] = 3,
    out: o.Out = None,
    as_json: o.Json = False,
    details: o.Details = False,
    no_color: o.NoColor = False,
    debug: o.Debug = False,  # noqa: ARG001 - main takes it out
) -> None:
    """Check that a run which saves and resumes is the same training as an uninterrupted one.

    Runs your command until it has saved, resumes, and runs it twice without an interruption.
    Weights, optimizer, scheduler, generators, samples and copies of the weights are compared.
    {dir} in a command is a new folder for the files of the run.
    """
    from moediag.pipeline import resume as resumer
    from moediag.pipeline.measured_jobs import MeasuringOptions
    from moediag.report import consoles, json_view, terminal, views, watch_display

    commands = resumer.Commands(
        command, _split("--resumed", resumed), _split("--interrupted", interrupted), after
    )
    with watch_display.view(no_color, 60.0, to_stderr=as_json) as view:
        done = resumer.resume(
            commands,
            MeasuringOptions(
                steps=steps,
                out=out,
                stdout=view.job_stdout,
                stderr=view.job_stderr,
                on_progress=view.progress,
                tell=view.line,
            ),
        )
    if as_json:
        stdout.write(json_view.render(done.result))
    else:
        terminal.render(done.result, consoles.output(no_color), views.short(done.folder), details)
        stderr.line(f"moediag: evidence in {views.short(done.folder)}")
    raise typer.Exit(done.exit_code)


def _split(option: str, given: str | None) -> list[str]:
    from moediag.errors import UsageError

    try:
        words = shlex.split(given) if given is not None else []
    except ValueError as error:
        raise UsageError(f"{option} {given!r}: {error}") from error
    if given is not None and not words:
        raise UsageError(f"{option} is empty", "Give a command, or leave the option out.")
    return words
