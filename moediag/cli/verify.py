"""`moediag verify`: parse, call, exit code."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from moediag.cli import options as o
from moediag.report import stderr, stdout


def verify(
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD…", help="Your distributed training command.")
    ],
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="'CMD'",
            help="The command that trains the same model in one process, on the samples that all "
            "ranks see together. Default: your command with one process.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, metavar="K", help="Compare the first K steps of the optimizer.")
    ] = 2,
    out: o.Out = None,
    as_json: o.Json = False,
    details: o.Details = False,
    no_color: o.NoColor = False,
    debug: o.Debug = False,  # noqa: ARG001 - main takes it out
) -> None:
    """Compare the first steps of a distributed job with the same steps in one process.

    Both commands run unchanged. The reference starts from the weights of the distributed run;
    gradients before clipping, norms and weights after each step are compared.
    """
    from moediag.errors import UsageError
    from moediag.pipeline import verify as verifier
    from moediag.pipeline.measured_jobs import MeasuringOptions
    from moediag.report import consoles, json_view, terminal, views, watch_display

    try:
        alone = shlex.split(reference) if reference is not None else []
    except ValueError as error:
        raise UsageError(f"--reference {reference!r}: {error}") from error
    if reference is not None and not alone:
        raise UsageError("--reference is empty", "Give the command that trains in one process.")
    with watch_display.view(no_color, 60.0, to_stderr=as_json) as view:
        done = verifier.verify(
            command,
            alone,
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
