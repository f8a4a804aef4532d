"""`moediag verify`: parse, call, exit code."""

from __future__ import annotations

from typing import Annotated

import typer

from moediag.cli import options as o
from moediag.cli.compared_runs import run, words


@o.with_options
def verify(
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD…", help="Your distributed training command.")
    ],
    reference: str | None = None,
    steps: Annotated[int, typer.Option(min=1)] = 2,
    out: o.Out = None,
    as_json: o.Json = False,
    details: o.Details = False,
    no_color: o.NoColor = False,
    debug: o.Debug = False,  # noqa: ARG001 - main takes it out
) -> None:
    """Compare the first steps of a distributed job with the same steps in one process.

    Both commands run unchanged. The reference starts from the weights of the distributed run;
    gradients before clipping, norms and weights after each step are compared.

    Options:
    --reference 'CMD': The command that trains the same model in one process, on the samples that
        all ranks see together. Default: your command with one process.
    --steps K: Compare the first K steps of the optimizer.
    """
    from moediag.pipeline import verify as verifier

    alone = words("--reference", reference, "Give the command that trains in one process.")
    raise run(
        lambda options: verifier.verify(command, alone, options),
        steps, out, as_json, details, no_color,
    )  # fmt: skip
