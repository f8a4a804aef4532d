"""`moediag watch`: parse, call, exit code."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moediag.cli import options as o
from moediag.report import stderr, stdout

if TYPE_CHECKING:
    from moediag.result import RunResult, TrialResult


@o.with_options
def watch(
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD…", help="Your training command, unchanged.")
    ],
    on_hang: str = "report",
    quiescence: o.Quiescence = 3.0,
    patience: Annotated[float, typer.Option(min=1.0)] = 30.0,
    grace: Annotated[float, typer.Option(min=0.0)] = 5.0,
    shared: Path | None = None,
    silence: o.Silence = 20.0,
    guard: bool = False,
    laws: bool = False,
    laws_every: Annotated[int | None, typer.Option(min=1)] = None,
    allow: list[str] | None = None,
    strict: bool = False,
    notify: o.Notify = None,
    every: Annotated[float, typer.Option(min=1.0)] = 60.0,
    log_mb: Annotated[int, typer.Option(min=1)] = 8,
    redact: bool = False,
    out: o.Out = None,
    as_json: o.Json = False,
    details: o.Details = False,
    no_color: o.NoColor = False,
    debug: o.Debug = False,  # noqa: ARG001 - main takes it out
) -> None:
    """Watch any training command; report which rank hangs or died, where and why.

    The script is not changed: PYTHONPATH loads a recorder in every rank. The exit code is that of
    the job, or 1 if a failure was found.

    Options:
    --on-hang report|abort|continue|COMMAND: What to do after a hang or a death was reported: leave
        the job alone, end it, keep watching, or run COMMAND in a shell for at most 5 minutes.
    --patience S: Report a hang after ranks waited this many seconds for one that cannot continue,
        or four times as long for one that may be slow.
    --grace S: Give a job that is interrupted or aborted this many seconds to end before SIGKILL.
    --shared DIR: On several nodes: a folder that all nodes of the job can reach.
    --guard: Compare parameters between ranks before each FSDP2 reduction.
    --laws: Check at steps 1, 2, 3, 6, 12, 24 and so on what must hold in any healthy job: equal
        replicas, different samples on each rank, parameters that train.
    --laws-every N: As --laws, but check steps 1, 2, 3 and every N steps.
    --allow LAW[:PATTERN]: Accept what the job does on purpose, such as replicas-apart: everywhere,
        or for parameters whose names match PATTERN.
    --strict: Exit with code 1 also for what is only suspicious.
    --every S: Print a status line every S seconds when stderr is a log.
    --log-mb N: Limit the log of each rank to N megabytes.
    --redact: Replace names of hosts, users and folders in the run directory when the job has ended.
    """
    from moediag.errors import Interrupted
    from moediag.launch.watched import JobOptions
    from moediag.pipeline import watch as watcher
    from moediag.report import consoles, json_view, terminal, views, watch_display
    from moediag.report.notify import Notifier, of_result
    from moediag.report.text_layout import plain
    from moediag.result import FAILURES

    watcher.check_on_hang(on_hang)
    if problem := watcher.no_folder(shared):
        stderr.line(f"moediag: {problem}")
        shared = None
    notifier = Notifier(notify) if notify else None
    job = JobOptions(
        guard=guard,
        laws_every=laws_every or (0 if laws else None),
        allowed=watcher.check_allowed(allow or ()),
        segment_bytes=log_mb * 1024 * 1024 // 2,
    )
    options = watcher.WatchOptions(on_hang=on_hang, out=out, shared=shared, job=job, redact=redact)
    launch = dataclasses.replace(
        options.launch, quiescence=quiescence, patience=patience, silence=silence, end=grace
    )
    name = watcher.title(command)
    last: list[tuple[TrialResult, Path]] = []  # of a job that restarts for days, only the newest

    def close(result: RunResult, folder: Path) -> None:
        for line in terminal.closing(result, stderr.width(), views.short(folder)):
            stderr.line(plain(line))

    with watch_display.view(no_color, every, to_stderr=as_json) as view:
        options = dataclasses.replace(
            options, launch=launch, stdout=view.job_stdout, stderr=view.job_stderr
        )

        def tell(found: TrialResult, folder: Path) -> None:
            if notifier is not None and watcher.tells(found, folder):
                told = of_result(watcher.of_job(name, [found]), folder)
                notifier.send(f"{found.evidence} {found.signature}", told)
            if as_json:
                return
            if not found.world_size:
                view.line("; ".join(("nothing was recorded", *found.diagnosis.not_seen)))
            elif found.verdict in FAILURES or found.verdict == "inconclusive":
                with view.aside():
                    terminal.render(
                        watcher.of_job(name, [found]),
                        consoles.output(no_color),
                        views.short(folder),
                        details,
                        answer=False,
                    )
            else:
                for text in (found.cause, *(f"note: {note}" for note in found.notes)):
                    view.line(text)

            last[:] = [(found, folder)]

        def law(text: str) -> None:
            view.line(f"a law is broken; the page follows when the job has ended. {text}")

        try:
            done = watcher.watch(command, options, tell, view.progress, law)
        except Interrupted:
            for found, folder in last:
                close(watcher.of_job(name, [found]), folder)
            raise
        finally:
            unsent = notifier.finish() if notifier is not None else []
    for how in (*done.commands, *unsent):
        stderr.line(f"moediag: {how}")
    if done.lost:
        stderr.line(
            f"moediag: evidence is missing, because it could not be written ({done.lost}). "
            "Make room, or use --out on another disk."
        )
    if as_json:
        stdout.write(json_view.render(done.result))
    else:
        close(done.result, done.folder)
    raise typer.Exit(done.exit_code_if(strict))
