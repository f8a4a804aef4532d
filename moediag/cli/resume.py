"""`moediag resume`: parse, call, exit code."""

from __future__ import annotations

from typing import Annotated

import typer

from moediag.cli import options as o
from moediag.cli.compared_runs import run, words


@o.with_options
def resume(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- CMD…", help="Your training command, which saves checkpoints."),
    ],
    resumed: str | None = None,
    interrupted: str | None = None,
    after: Annotated[int, typer.Option(min=1)] = 1,
    steps: Annotated[int, typer.Option(min=1)] = 3,
    out: o.Out = None,
    as_json: o.Json = False,
    details: o.Details = False,
    no_color: o.NoColor = False,
    debug: o.Debug = False,  # noqa: ARG001 - main takes it out
) -> None:
    """Check that a run that saves and resumes trains exactly as an uninterrupted one.

    Runs your command until it has saved, resumes it, and runs it twice without interruption.
    Weights, optimizer, scheduler, generators, samples and copies of the weights are compared.
    {dir} in a command is a new folder for the files of the run.

    Options:
    --resumed 'CMD': The command that resumes. Default: your command again; a Trainer of
        transformers is then given the checkpoint.
    --interrupted 'CMD': A command that saves and ends. Default: your command, ended after its first
        checkpoint.
    --after N: Use the first checkpoint saved after N steps.
    --steps K: Compare the first K steps after the save.
    """
    from moediag.pipeline import resume as resumer

    advice = "Give a command, or leave the option out."
    commands = resumer.Commands(
        command,
        words("--resumed", resumed, advice),
        words("--interrupted", interrupted, advice),
        after,
    )
    raise run(
        lambda options: resumer.resume(commands, options), steps, out, as_json, details, no_color
    )
