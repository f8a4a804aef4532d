"""`moediag hunt`: parse, call, exit code."""

from __future__ import annotations

from typing import Annotated

import typer

from moediag.lab.cli import completions
from moediag.lab.cli import options as o


@o.with_options
def hunt(
    context: typer.Context,
    release: Annotated[str, typer.Option(autocompletion=completions.releases)] = "newest",
    against: str = "",
    family: o.Families = [],  # noqa: B006
    relation: list[str] = [],  # noqa: B006
    cpu: Annotated[int, typer.Option(min=1)] = 1,
    stack: o.StackPairs = [],  # noqa: B006
    timeout: Annotated[float, typer.Option(min=1.0)] = 120.0,
    minutes: Annotated[float | None, typer.Option(min=0.0)] = None,
    pursue: bool = False,
    executor: o.ExecutorOption = o.ExecutorKind.local,
    executor_arg: o.ExecutorArgs = [],  # noqa: B006
    out: o.Out = None,
    resume: bool = False,
    html: o.Html = None,
    markdown: o.Markdown = None,
    junit: o.Junit = None,
    as_json: o.Json = False,
    no_color: o.NoColor = False,
    debug: o.Debug = False,  # noqa: ARG001
) -> None:
    """Check what must hold for every model family of a transformers release.

    A cell is one relation on a tiny model of one family, in one process or on two ranks. Exit code
    1: a confirmed finding that the register does not list, with --against one that appeared; 3:
    something could not be decided or confirmed.

    Options:
    --release V: Check this release of transformers.
    --against V: Check this release too, and show only what differs; previous: the release before
        --release.
    --relation NAME: Check only these relations.
    --cpu N: Run N cells at once, on the CPU.
    --timeout S: End a cell after this many seconds.
    --minutes: Start no cell after this many minutes.
    --pursue: For each new finding: shrink the model, bisect the releases, write one file and a
        draft issue.
    --resume: Resume the hunt in --out DIR, also with more families or relations.
    """
    chosen_views = o.views(as_json, html=html, markdown=markdown, junit=junit)
    from moediag.lab.campaign.engine import shown
    from moediag.lab.campaign.executors import Choice
    from moediag.lab.campaign.hunt import findings_page, session
    from moediag.lab.campaign.hunt.question import Wanted
    from moediag.report import answer_views

    chosen = Choice.parse(executor.value, executor_arg)
    wanted = Wanted(
        release=release, families=o.names(family) or Wanted().families,
        relations=o.names(relation),
        stack=o.pairs(stack, "--stack"), timeout=timeout, at_once=chosen.at_once(cpu),
        minutes=minutes, against=against, pursue=pursue,
    )  # fmt: skip
    with shown(no_color) as display:
        found, folder = session.run(wanted, out, resume, o.command(context), display, chosen)
    page = findings_page.answer(found)
    raise typer.Exit(
        answer_views.show(page, folder / session.PAGE_FILE, as_json, no_color, chosen_views)
    )
