"""`moediag matrix`: parse, call, exit code."""

from __future__ import annotations

from typing import Annotated

import typer

from moediag.lab.cli import completions
from moediag.lab.cli import options as o


@o.with_options
def matrix(
    context: typer.Context,
    scenarios: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME|FILE.yaml…",
            help="Scenarios, one column each.",
            autocompletion=completions.scenarios,
        ),
    ],
    family: Annotated[list[str], typer.Option(autocompletion=completions.families)] = [],  # noqa: B006
    package: o.Package = "transformers",
    releases: str = "",
    oldest: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="V",
            help="Start with this release, with the newest patch of each minor.  "
            "[default: transformers 4.51, others two years]",
        ),
    ] = "",
    newest: Annotated[
        str, typer.Option("--to", metavar="V", help="End with this release.  [default: the newest]")
    ] = "",
    hold: o.Hold = [],  # noqa: B006
    python: o.Python = "",
    variant: o.Variant = "",
    gpus: o.Gpus = None,
    cpu: o.Cpu = None,
    share_gpu: o.ShareGpu = False,
    set_: o.SetPairs = [],  # noqa: B006
    launcher: o.LauncherOption = o.LauncherKind.auto,
    timeout: o.Timeout = None,
    quiescence: o.Quiescence = 3.0,
    executor: o.ExecutorOption = o.ExecutorKind.local,
    executor_arg: o.ExecutorArgs = [],  # noqa: B006
    out: o.Out = None,
    resume: bool = False,
    dry_run: o.DryRun = False,
    html: o.Html = None,
    markdown: o.Markdown = None,
    junit: o.Junit = None,
    as_json: o.Json = False,
    no_color: o.NoColor = False,
    debug: o.Debug = False,  # noqa: ARG001
) -> None:
    """Show which releases have which failures, for scenarios or for the families of one.

    Each cell is a run of the unfixed variant and its controls, like a probe of `moediag bisect`.

    Options:
    --family F: Add a column for this model family; repeatable; `all` for every one.  [default: the
        scenario's]
    --releases V,V,…: Use these releases instead of the newest patch of each minor.
    --resume: Resume the matrix in --out DIR, also with more columns or releases.
    """
    world_size, device = o.where(gpus, cpu, share_gpu)
    chosen_views = o.views(as_json, html=html, markdown=markdown, junit=junit)

    from moediag.lab.campaign.bisect.question import Asked
    from moediag.lab.campaign.engine import shown
    from moediag.lab.campaign.executors import Choice
    from moediag.lab.campaign.matrix import question, session, table_page
    from moediag.launch.settings import LaunchOptions
    from moediag.report import answer_views

    chosen = Choice.parse(executor.value, executor_arg)
    wanted = question.Wanted(
        names=tuple(scenarios), overrides=tuple(set_), families=tuple(family), package=package,
        releases=o.names([releases]),
        oldest=oldest, newest=newest,
        asked=Asked(
            hold=o.pairs(hold, "--hold"), python=python, variant=variant, world_size=world_size,
            device=device, launcher=launcher.value, timeout=timeout, calibrate=1,
        ),
    )  # fmt: skip
    asked = question.ask(wanted)
    if dry_run:
        from moediag.lab.campaign import dry_run as dry

        dry.show([*session.dry_trials(asked)], as_json)
        return
    if chosen.here:
        o.require_gpus(device, max(s.question.world_size for s in asked.subjects))
    command = o.command(context)
    with shown(no_color) as display:
        launch = LaunchOptions(quiescence=quiescence)
        found, folder = session.run(asked, out, resume, command, display, launch, chosen)
    page = table_page.answer(found)
    report = folder / session.PAGE_FILE
    raise typer.Exit(answer_views.show(page, report, as_json, no_color, chosen_views))
