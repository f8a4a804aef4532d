"""`moediag bisect`: parse, call, exit code."""

from __future__ import annotations

import functools
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moediag.lab.cli import completions
from moediag.lab.cli import options as o
from moediag.report import stdout

if TYPE_CHECKING:
    from moediag.lab.campaign.bisect.commits.clone import Clone
    from moediag.lab.campaign.bisect.question import Question


class MatchKind(str, Enum):
    exact = "exact"
    same_class = "class"
    any = "any"


@o.with_options
def bisect(
    context: typer.Context,
    name: o.Name,
    package: o.Package = "transformers",
    bad: Annotated[str, typer.Option(autocompletion=completions.releases)] = "",
    good: Annotated[str, typer.Option(autocompletion=completions.releases)] = "",
    window: bool = False,
    oldest: str = "",
    pre: bool = False,
    yanked: bool = False,
    hold: o.Hold = [],  # noqa: B006
    python: o.Python = "",
    match: MatchKind = MatchKind.exact,
    variant: o.Variant = "",
    calibrate: Annotated[int, typer.Option(min=1)] = 3,
    repo: Path | None = None,
    git_bisect: bool = False,
    gpus: o.Gpus = None,
    cpu: o.Cpu = None,
    share_gpu: o.ShareGpu = False,
    set_: o.SetPairs = [],  # noqa: B006
    launcher: o.LauncherOption = o.LauncherKind.auto,
    timeout: o.Timeout = None,
    quiescence: o.Quiescence = 3.0,
    jobs: Annotated[int, typer.Option(min=1)] = 1,
    executor: o.ExecutorOption = o.ExecutorKind.local,
    executor_arg: o.ExecutorArgs = [],  # noqa: B006
    out: o.Out = None,
    resume: o.Resume = False,
    dry_run: o.DryRun = False,
    html: o.Html = None,
    markdown: o.Markdown = None,
    junit: o.Junit = None,
    as_json: o.Json = False,
    no_color: o.NoColor = False,
    debug: o.Debug = False,  # noqa: ARG001
) -> None:
    """Find the release that broke a scenario, and with --window the release that fixed it.

    Each probe runs the unfixed variant and its controls on one release. A release is bad only if it
    shows the failure of the bad release, and good only if the variant and a control run clean.
    Other failures do not affect the search.

    Options:
    --bad V: A release that has the failure.  [default: the scenario's, else found]
    --good V: A release without it, older or newer.  [default: found]
    --window: Search also the release that fixed it.
    --oldest V: Search back to here.  [default: two years before --bad]
    --pre: Include pre-releases.
    --yanked: Include yanked releases.
    --match exact|class|any: How much of the failure's signature must match.
    --calibrate N: Run the bad release N times to measure how often it fails.
    --repo PATH: Find the commit too, in this clone of its source.
    --git-bisect: For `git bisect run`: judge the working tree (exit code 0 good, 1 bad, 125
        neither, from 128 on: stop).
    --jobs, -j N: Run N probes at once. The answer is the same.
    """
    world_size, device = o.where(gpus, cpu, share_gpu)
    chosen_views = o.views(as_json, html=html, markdown=markdown, junit=junit)
    held = o.pairs(hold, "--hold")

    from moediag.lab.campaign.bisect import answer_page, question, session
    from moediag.lab.campaign.bisect.probe import Releases
    from moediag.lab.campaign.bisect.signature_match import Match
    from moediag.lab.campaign.engine import shown
    from moediag.lab.campaign.executors import Choice
    from moediag.lab.scenario import catalogue
    from moediag.lab.scenario import load as loading
    from moediag.launch.settings import LaunchOptions
    from moediag.report import answer_views

    chosen = Choice.parse(executor.value, executor_arg)
    scenario = loading.load(catalogue.find(name), set_)
    asked = question.Asked(
        name=name, package=package, bad=bad, good=good, oldest=oldest, window=window,
        pre=pre, yanked=yanked,
        hold=held, python=python, match=Match(match.value), variant=variant,
        world_size=world_size, device=device, launcher=launcher.value, timeout=timeout,
        calibrate=calibrate,
    )  # fmt: skip
    what = question.ask(scenario, asked)
    if dry_run:
        forecast = session.forecast(what)
        if as_json:
            stdout.data(forecast.to_json())
        else:
            for line in forecast.lines():
                stdout.line(line)
        return
    if chosen.here:
        o.require_gpus(device, what.world_size * jobs, held.get("torch"))
    clone = _clone(repo, what) if repo and not git_bisect else None
    command = o.command(context)
    launch = LaunchOptions(quiescence=quiescence)
    with shown(no_color) as display:
        make = functools.partial(Releases, launch=launch)
        if git_bisect:
            from moediag.lab.campaign.bisect.commits import git_bisect as adapter
            from moediag.lab.campaign.bisect.commits.clone import Clone

            here = Clone(repo or Path.cwd())
            verdict = adapter.judge_checkout(what, here, out, command, make, display, chosen)
            raise typer.Exit(adapter.code(verdict))
        report, folder = session.run(
            what, out, resume, command, make, display, chosen.at_once(jobs), clone, chosen
        )
    page = answer_page.answer(report)
    where = folder / session.REPORT_FILE
    raise typer.Exit(answer_views.show(page, where, as_json, no_color, chosen_views))


def _clone(repo: Path, what: Question) -> Clone:
    """Opens the clone now, so that UsageError comes before an hour of probes."""
    from moediag.lab.campaign.bisect.commits.clone import Clone

    found = Clone(repo)
    found.tagged(what.package, what.bad)
    return found
