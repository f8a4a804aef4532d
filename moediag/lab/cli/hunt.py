"""`moediag hunt`: parse, call, exit code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from moediag.errors import ExitCode
from moediag.lab.cli import completions
from moediag.lab.cli import options as o
from moediag.report import stdout

if TYPE_CHECKING:
    from pathlib import Path

    from moediag.lab.campaign.hunt.findings import Hunt


def hunt(
    context: typer.Context,
    release: Annotated[
        str,
        typer.Option(
            metavar="V",
            help="Check this release of transformers.",
            autocompletion=completions.releases,
        ),
    ] = "newest",
    against: Annotated[
        str,
        typer.Option(
            metavar="V",
            help="Check this release too, and show only what differs; previous: the release before "
            "--release.",
        ),
    ] = "",
    family: Annotated[
        list[str],
        typer.Option(
            "--family",
            metavar="F",
            autocompletion=completions.families,
            help="Check these model types, or the kind moe, dense, multimodal or all: names with "
            "commas, repeatable.  [default: moe]",
        ),
    ] = [],  # noqa: B006
    relation: Annotated[
        list[str],
        typer.Option("--relation", metavar="NAME", help="Check only these relations."),
    ] = [],  # noqa: B006
    cpu: Annotated[
        int, typer.Option("--cpu", min=1, metavar="N", help="Run N cells at once, on the CPU.")
    ] = 1,
    stack: o.StackPairs = [],  # noqa: B006
    timeout: Annotated[
        float,
        typer.Option("--timeout", min=1.0, metavar="S", help="End a cell after this many seconds."),
    ] = 120.0,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", min=0.0, help="Start no cell after this many minutes."),
    ] = None,
    pursue: Annotated[
        bool,
        typer.Option(
            "--pursue",
            help="For each new finding: shrink the model, bisect the releases, write one file and "
            "a draft issue.",
        ),
    ] = False,
    executor: o.ExecutorOption = o.ExecutorKind.local,
    executor_arg: o.ExecutorArgs = [],  # noqa: B006
    out: o.Out = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Resume the hunt in --out DIR, also with more families or relations."
        ),
    ] = False,
    as_json: o.Json = False,
    no_color: o.NoColor = False,
    debug: o.Debug = False,  # noqa: ARG001
) -> None:
    """Check what must hold for every model family of a transformers release.

    A cell is one relation on a tiny model of one family, in one process or on two ranks. Exit code
    1: a confirmed finding that the register does not list, with --against one that appeared; 3:
    something could not be decided or confirmed.
    """
    from moediag.lab.campaign.engine import shown
    from moediag.lab.campaign.executors import Choice
    from moediag.lab.campaign.hunt import findings_page, session
    from moediag.lab.campaign.hunt.question import Wanted

    chosen = Choice.parse(executor.value, executor_arg)
    wanted = Wanted(
        release=release, families=o.names(family) or Wanted().families,
        relations=o.names(relation),
        stack=o.pairs(stack, "--stack"), timeout=timeout, at_once=chosen.at_once(cpu),
        minutes=minutes, against=against, pursue=pursue,
    )  # fmt: skip
    with shown(no_color) as display:
        found, folder = session.run(wanted, out, resume, o.command(context), display, chosen)
    if as_json:
        stdout.line(json.dumps(findings_page.to_json(found), indent=1, ensure_ascii=False))
    else:
        _show(found, folder, no_color)
    raise typer.Exit(exit_code(found))


def exit_code(found: Hunt) -> int:
    from moediag.lab.campaign.hunt.findings import State
    from moediag.lab.campaign.hunt.release_changes import changes

    if found.before is not None:
        differs = changes(found)
        if any(finding.state == State.NEW for finding in differs.appeared):
            return ExitCode.FAILURE_FOUND
        doubtful: object = differs.undecided or found.missing or found.before.missing
        return ExitCode.INCONCLUSIVE if doubtful else ExitCode.OK
    if found.of(State.NEW):
        return ExitCode.FAILURE_FOUND
    doubtful = found.of(State.NOT_CONFIRMED) or found.undecided or found.not_built or found.missing
    return ExitCode.INCONCLUSIVE if doubtful else ExitCode.OK


def _show(found: Hunt, folder: Path, no_color: bool) -> None:
    from moediag.lab.campaign.hunt import findings_page
    from moediag.report import consoles, terminal, views

    console = consoles.output(no_color)
    for line in findings_page.lines(found, min(console.width, terminal.WIDEST)):
        terminal.show(line, console)
    stdout.line(f" Report: {views.short(folder) / 'hunt.md'}")
