"""`moediag attach`: parse, call, exit code."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moediag.cli import options as o
from moediag.errors import ExitCode, UsageError
from moediag.report import stderr, stdout
from moediag.result.wording import plural

if TYPE_CHECKING:
    from moediag.launch.attach.collecting import AttachOptions
    from moediag.launch.attach.found_jobs import Job
    from moediag.pipeline.attach import Attached

    Look = Callable[[Path | None], Attached]

_LEAST = 5.0  # seconds between two looks


def _signal(name: str | None) -> signal.Signals | None:
    try:
        return signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"] if name else None
    except KeyError:
        raise UsageError(f"--dump {name}: no such signal", "Example: --dump USR1") from None


def _on_machines(option: str, value: str, options: AttachOptions) -> Look:
    from moediag.launch.attach import machines
    from moediag.pipeline import attach_machines

    of = {"--slurm": machines.of_slurm, "--hosts": machines.of_hosts, "--kubectl": machines.of_pods}
    found = of[option](value)
    _progress(f"looking at {', '.join(one.name for one in found)}")
    slurm = value if option == "--slurm" else ""
    return lambda out: attach_machines.attach(
        f"{option} {value}", found, options, slurm, out, _progress
    )


def _here(job: Job, options: AttachOptions) -> Look:
    from moediag.pipeline import attach as attaching

    return lambda out: attaching.attach(attaching.again(job), options, out, _progress)


def _progress(text: str) -> None:
    stderr.line(f"moediag: {text}")


@o.with_options
def attach(
    context: typer.Context,
    pid: o.Pid = None,
    slurm: str | None = None,
    hosts: str | None = None,
    kubectl: str | None = None,
    patience: Annotated[float, typer.Option(min=1.0)] = 30.0,
    no_locals: bool = False,
    collect: Path | None = None,
    redact: bool = False,
    dump: str | None = None,
    dump_anyway: bool = False,
    follow: bool = False,
    notify: o.Notify = None,
    html: o.Html = None,
    out: o.Out = None,
    as_json: o.Json = False,
    details: o.Details = False,
    no_color: o.NoColor = False,
    debug: o.Debug = False,  # noqa: ARG001 - main takes it out
) -> None:
    """Inspect a running job that was started without moediag; report whether it hangs, and
    why.

    The job continues as before: no signal is sent and nothing is loaded into it. Without PID, takes
    your only training job on this machine, or lists them.

    Options:
    --slurm JOB: Inspect all nodes of this Slurm job, by srun --overlap.
    --hosts A,B,C: Inspect the job on these machines, by ssh.
    --kubectl SELECTOR: Inspect all pods with these labels, by kubectl exec: app=train, or
        'app=train -n ml'.
    --patience S: Call ranks hung that have waited for this many seconds, or for four times that if
        one may be slow; observe them for that long where the kernel does not tell.
    --no-locals: Do not read numbers from local variables.
    --collect FILE.tgz: Also write the evidence as one file, for `moediag diagnose FILE.tgz`
        elsewhere.
    --redact: Replace names of hosts, users and folders in the collected file.
    --dump SIGNAL: If the job makes no progress, send this signal to its ranks, which must have
        registered faulthandler for it, and read the stacks that they write: USR1, for example. No
        other option affects the job.
    --dump-anyway: With --dump: also if the job may still progress.
    --follow: Look again every --patience seconds, until the job hangs or ends.
    """
    chosen = o.views(as_json, html=html)
    from moediag.launch.attach.collecting import AttachOptions
    from moediag.pipeline import attach as attaching
    from moediag.report import consoles, json_view, page, terminal, views

    options = AttachOptions(patience, not no_locals, _signal(dump), dump_anyway)
    elsewhere = {"--slurm": slurm, "--hosts": hosts, "--kubectl": kubectl}
    given = [(name, value) for name, value in elsewhere.items() if value is not None]
    typed = {name for name in ("redact", "notify") if _typed(context, name)}
    _check(options, [name for name, _ in given], pid, collect, follow, typed)
    if given:
        look = _on_machines(*given[0], options)
    else:
        job = attaching.choose(pid)
        _progress(f"looking at {attaching.described(job)}")
        if options.dump is not None:
            when = "now" if dump_anyway else "if the job makes no progress"
            _progress(f"{options.dump.name} will be sent to its ranks, {when}: each that has a "
                      "handler runs it")  # fmt: skip
        look = _here(job, options)
    ended = False
    if follow:
        done, ended = _followed(look, out, max(patience, _LEAST), notify)
    else:
        done = look(out)
    if as_json:
        stdout.write(json_view.render(done.result))
    elif Path("-") not in chosen.values() and not ended:
        terminal.render(done.result, consoles.output(no_color), views.short(done.folder), details)
    # The page first: it is shown also if a file cannot be written.
    if collect is not None:
        attaching.write_archive(done, collect, redact)
        stderr.line(f"wrote {collect}")
    for told in views.write([done.result], chosen, dict):
        stderr.line(told)
    raise typer.Exit(ExitCode.OK if ended else page.exit_code(done.result))


def _typed(context: typer.Context, name: str) -> bool:
    """Whether an option was typed: defaults of the configuration file do not contradict others."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _check(
    options: AttachOptions, elsewhere: Sequence[str], pid: int | None, collect: Path | None,
    follow: bool, typed: Collection[str],
) -> None:  # fmt: skip
    """Raises UsageError for options that do not go together."""
    if "redact" in typed and collect is None:
        raise UsageError("--redact needs --collect", "Add: --collect out.tgz")
    if "notify" in typed and not follow:
        raise UsageError("--notify needs --follow", "Add: --follow")
    if options.dump_anyway and options.dump is None:
        raise UsageError("--dump-anyway needs --dump", "Add: --dump USR1")
    if follow and options.dump is not None:
        raise UsageError("--dump and --follow exclude each other", "Send it once the job hangs.")
    if elsewhere and options.dump is not None:
        raise UsageError(f"--dump and {elsewhere[0]} exclude each other", "Run it on each machine.")
    if len(elsewhere) + (pid is not None) > 1:
        raise UsageError("give a PID, --slurm, --hosts or --kubectl: only one of them")


def _followed(
    look: Look, out: Path | None, every: float, notify: str | None
) -> tuple[Attached, bool]:
    """Follows a job; returns the last look at it, and whether it ended without a hang."""
    from moediag.pipeline import attach_follow
    from moediag.report.notify import Notifier, of_result

    notifier = Notifier(notify) if notify else None
    _progress(f"looking every {every:.0f} s until the job hangs or ends; Ctrl-C stops looking")
    found = attach_follow.follow(look, out, every, lambda text: _progress(f"undecided: {text}"))
    done = found.last
    if found.ended:
        seen = f"{plural(found.clean, 'look')} saw it progress, none saw a hang"
        _progress(f"the job ended; its exit code is not known. {seen}")
    elif notifier is not None:
        notifier.send(done.result.trials[-1].signature, of_result(done.result, done.folder))
        for unsent in notifier.finish():
            _progress(unsent)
    return done, found.ended and found.clean > 0
