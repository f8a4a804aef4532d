"""`moediag check`: parse, call, exit code."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from moediag.cli import options as o
from moediag.errors import UsageError
from moediag.report import stdout


class Wrapper(str, Enum):
    auto = "auto"
    fsdp2 = "fsdp2"
    transformers = "transformers"


def check(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="A folder with config.json, the file, or a hub name that the local cache has.",
        ),
    ],
    layout: Annotated[
        str,
        typer.Option(metavar="AXIS=N,…", help="Mesh axes and sizes: dp_shard=64,ep=8."),
    ],
    world: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Number of ranks.  [default: the product of the axes]"
        ),
    ] = None,
    stack: o.StackPairs = [],  # noqa: B006
    wrapper: Annotated[
        Wrapper,
        typer.Option(
            metavar="auto|fsdp2|transformers",
            help="Who shards: torch's fully_shard, or from_pretrained; auto: from_pretrained for "
            "ep, tp and pp.",
        ),
    ] = Wrapper.auto,
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Do not simulate a step.")] = False,
    timeout: Annotated[
        float, typer.Option(min=1.0, metavar="S", help="End the check after this many seconds.")
    ] = 600.0,
    out: o.Out = None,
    as_json: o.Json = False,
    no_color: o.NoColor = False,
    debug: o.Debug = False,  # noqa: ARG001
) -> None:
    """Check a model, a layout and releases before a job is launched.

    Needs no GPU and no weights. The library's own code shards the model without weights, on
    simulated ranks. Exit code 1: something fails; 3: it could not be decided.
    """
    from moediag.campaign.engine import shown
    from moediag.pipeline import check as checker
    from moediag.pipeline import check_page
    from moediag.report import consoles, terminal, views

    options = checker.CheckOptions(
        config=config, layout=_axes(layout), world=world, stack=o.pairs(stack, "--stack"),
        wrapper="" if wrapper is Wrapper.auto else wrapper.value, simulate=not plan_only,
        timeout=timeout, out=out,
    )  # fmt: skip
    with shown(no_color) as display:
        found = checker.check(options, lambda text, done: display.stack("check", text, done))
    if as_json:
        stdout.line(checker.as_text(found))
    else:
        console = consoles.output(no_color)
        for line in check_page.lines(found, min(console.width, terminal.WIDEST)):
            terminal.show(line, console)
        stdout.line(f" Report: {views.short(found.folder) / checker.RESULT}")
    raise typer.Exit(found.exit_code)


def _axes(text: str) -> dict[str, int]:
    """Parses ``dp_shard=64,ep=8``. Raises UsageError."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not (name.strip() and size.strip().isdecimal()) or name.strip() in found:
            raise UsageError(
                f"--layout {text!r}: {part!r} is not of the form AXIS=N, or is repeated",
                "For example: --layout dp_shard=64,ep=8",
            )
        found[name.strip()] = int(size)
    return found
