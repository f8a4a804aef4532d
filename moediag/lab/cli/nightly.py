"""`moediag nightly`: parse, call, exit code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moediag.errors import ExitCode, UsageError
from moediag.lab.cli import options as o
from moediag.report import stderr, stdout

if TYPE_CHECKING:
    from moediag.lab.campaign.engine import Display
    from moediag.lab.campaign.executors import Choice
    from moediag.lab.campaign.nightly.blame import Blame
    from moediag.lab.campaign.nightly.changes import Compared
    from moediag.lab.campaign.nightly.jobs import Asked, Planned
    from moediag.result.answer_blocks import Answer


@o.with_options
def nightly(
    context: typer.Context,
    scenario: list[str] = [],  # noqa: B006
    track: list[str] = [],  # noqa: B006
    gpus: o.Gpus = None,
    cpu: o.Cpu = None,
    share_gpu: o.ShareGpu = False,
    minutes: Annotated[float, typer.Option(min=0.1)] = 60.0,
    bisect_minutes: Annotated[float, typer.Option(min=0.0)] = 20.0,
    hunt_minutes: Annotated[float, typer.Option(min=0.0)] = 15.0,
    family: o.Families = [],  # noqa: B006
    history: Path = Path("moediag-history"),
    nights: Annotated[int, typer.Option(min=2)] = 7,
    out: o.Out = None,
    resume: o.Resume = False,
    html: o.Html = None,
    junit: Path | None = None,
    summary: Path | None = None,
    notify: o.Notify = None,
    annotate: bool = False,
    launcher: o.LauncherOption = o.LauncherKind.auto,
    timeout: o.Timeout = None,
    executor: o.ExecutorOption = o.ExecutorKind.local,
    executor_arg: o.ExecutorArgs = [],  # noqa: B006
    dry_run: o.DryRun = False,
    as_json: o.Json = False,
    no_color: o.NoColor = False,
    debug: o.Debug = False,  # noqa: ARG001
) -> None:  # fmt: skip
    """Run the catalogue on pinned and new releases, and report what changed since earlier nights.

    One package changes at a time. After the runs, a hunt says which findings appeared and went away
    between the newest transformers and the release before. Each new failure is bisected between the
    last good night's release and tonight's, and written as a draft issue; nothing is filed. Exit
    code 1 means a new failure, or a finding that appeared.

    Options:
    --scenario NAME: Run only this scenario; repeatable.
    --track TRACK: Run on pinned, newest, pre, PACKAGE=newest or PACKAGE=pre; repeatable.  [default:
        the first three, for transformers, accelerate and torch]
    --minutes M: Time limit for all runs together.
    --bisect-minutes M: Time limit for all bisects of new failures, after the runs; 0: no bisect.
    --hunt-minutes M: Time limit for the hunt on the newest transformers against the release before;
        0, or --scenario without --family: no hunt.
    --history DIR: Keep the results of each night here.
    --nights N: Number of past nights used to call a failure flaky.
    --junit FILE: Write JUnit here.  [default: junit.xml in --out]
    --summary FILE: Write a summary.  [default: summary.md in --out]
    --annotate: Print new failures as GitHub annotations.
    """
    world_size, device = o.where(gpus, cpu, share_gpu)
    if annotate and as_json:
        raise UsageError("--annotate and --json exclude each other", "--json lists them too.")

    from moediag.lab.campaign.engine import opened, resumable, shown
    from moediag.lab.campaign.executors import Choice
    from moediag.lab.campaign.nightly import artifacts, drive, jobs, tracks
    from moediag.lab.campaign.nightly import summary as pages
    from moediag.lab.campaign.nightly.changes import compare
    from moediag.lab.campaign.nightly.hunted import hunted, news
    from moediag.lab.campaign.nightly.night import History
    from moediag.lab.stacks.base import cache_root, current_base
    from moediag.report import answer_views
    from moediag.report.notify import Notifier, of_answer

    notifier = Notifier(notify) if notify else None
    chosen_views = o.views(as_json, html=html)
    wanted = tracks.parse(track)
    engine = Choice.parse(executor.value, executor_arg)
    if engine.here and not dry_run:
        o.require_gpus(device, world_size or 1)
    base = current_base(cache_root())
    asked = jobs.Asked(
        tuple(scenario), world_size, device, launcher.value, timeout, (base.torch or "")
    )
    notes: list[str] = []
    chosen = list(tracks.resolved(wanted, base.python, notes.append))
    planned = jobs.plan_all(chosen, asked)
    if dry_run:
        from moediag.lab.campaign import dry_run as dry

        plans = [one.plan for one in planned if one.plan]
        problems = [
            f"{one.scenario} on {', '.join(track.name for track in one.tracks)}: {one.problem}"
            for one in planned
            if one.plan is None
        ]
        dry.show([*dry.trials(plans)], as_json, [*notes, *problems])
        return
    kept = History(history)
    question = drive.header(planned, asked, o.command(context))
    with opened(question, out, resume, "nightly") as journal, shown(no_color) as display:
        folder = journal.folder
        families = o.names(family)
        limit = 0.0 if scenario and not families else hunt_minutes
        at_once = (world_size or 1) if device == "cpu" else 1
        ran = drive.run(
            planned, asked, notes, kept, journal, minutes, display,
            hunt=lambda: hunted(chosen, history, limit, at_once, display, engine, families),
            executor=engine,
        )  # fmt: skip
        compared = compare(ran.night, kept.nights, nights)
        with resumable(journal, lambda: ran.done):
            blames = _blames(compared, planned, asked, folder, bisect_minutes, display, engine)
    earlier = [night for night in kept.nights if night.lane == asked.lane]
    new = tuple(news(ran.night, earlier))
    found = pages.Summary(ran.night, compared, blames, tuple(kept.unreadable), new)
    page = pages.answer(found)
    _write(page, artifacts.drafts(found, ran.results, folder), folder, junit, summary)
    code = answer_views.show(page, folder, as_json, no_color, chosen_views)
    if notifier is not None and code == ExitCode.FAILURE_FOUND:
        notifier.send("night", of_answer(page, folder))
    for unsent in notifier.finish() if notifier is not None else ():
        stderr.line(f"moediag: {unsent}")
    for command in pages.workflow_commands(found) if annotate else ():
        stdout.line(command)
    raise typer.Exit(code)


def _blames(
    compared: tuple[Compared, ...], planned: list[Planned], asked: Asked, folder: Path,
    minutes: float, display: Display, executor: Choice,
) -> Mapping[tuple[str, str, str], Blame]:  # fmt: skip
    """Bisects each new failure until the time is up."""
    from moediag.lab.campaign.engine import Clock
    from moediag.lab.campaign.nightly.blame import blame
    from moediag.lab.campaign.nightly.changes import Change
    from moediag.launch.settings import LaunchOptions

    names = {one.scenario: one.name for one in planned}
    found: dict[tuple[str, str, str], Blame] = {}
    with Clock(minutes * 60) as clock:
        for number, one in enumerate(c for c in compared if c.change == Change.NEW):
            where = folder / "bisect" / str(number + 1)
            name = names[one.entry.scenario]
            found[one.entry.key] = blame(
                one, name, asked, where, clock.left, display, LaunchOptions(), executor
            )
    return found


def _write(
    page: Answer, drafts: Mapping[str, str], folder: Path, junit: Path | None,
    summary: Path | None,
) -> None:  # fmt: skip
    from moediag.lab.campaign.nightly import artifacts
    from moediag.report import answer_views
    from moediag.report.views import put

    put(junit or folder / "junit.xml", answer_views.junit(page), "--junit")
    put(summary or folder / "summary.md", answer_views.markdown(page), "--summary")
    for name, text in drafts.items():
        put(folder / artifacts.FOLDER / name, text, "--out")
