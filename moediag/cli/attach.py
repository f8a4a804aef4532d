"""`moediag attach`: parse, call, exit code."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moediag.cli import options as o
from moediag.errors import UsageError
from moediag.report import stderr, stdout

if TYPE_CHECKING:
    from moediag.launch.attach.collecting import AttachOptions
    from moediag.pipeline.attach import Attached


def _signal(name: str | None) -> signal.Signals | None:
    try:
        return signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"] if name else None
    except KeyError:
        raise UsageError(f"--dump {name}: no such signal", "Example: --dump USR1") from None


def _on_machines(
    option: str, value: str, options: AttachOptions, out: Path | None,
    progress: Callable[[str], None],
) -> Attached:  # fmt: skip
    from moediag.launch.attach import machines
    from moediag.pipeline import attach_machines

    of = {"--slurm": machines.of_slurm, "--hosts": machines.of_hosts, "--kubectl": machines.of_pods}
    found = of[option](value)
    progress(f"looking at {', '.join(one.name for one in found)}")
    slurm = value if option == "--slurm" else ""
    return attach_machines.attach(f"{option} {value}", found, options, slurm, out, progress)


def attach(
    context: typer.Context,
    pid: Annotated[
        int | None,
        typer.Argument(
            metavar="[PID]",
            help="A process of the job: its launcher or a rank.  [default: your only job here]",
        ),
    ] = None,
    slurm: Annotated[
        str | None,
        typer.Option(metavar="JOB", help="All nodes of this Slurm job, by srun --overlap."),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="The job on these machines, by ssh.")
    ] = None,
    kubectl: Annotated[
        str | None,
        typer.Option(
            metavar="SELECTOR",
            help="All pods with these labels, by kubectl exec: app=train, or 'app=train -n ml'.",
        ),
    ] = None,
    patience: Annotated[
        float,
        typer.Option(
            min=1.0,
            metavar="S",
            help="Call ranks hung that have waited for this many seconds; look for as long where "
            "the kernel does not tell.",
        ),
    ] = 30.0,
    no_locals: Annotated[
        bool, typer.Option("--no-locals", help="Do not read numbers from local variables.")
    ] = False,
    collect: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.tgz",
            help="Also write the evidence as one file, for `moediag diagnose FILE.tgz` elsewhere.",
        ),
    ] = None,
    redact: Annotated[
        bool,
        typer.Option(
            "--redact", help="Replace names of hosts, users and folders in the collected file."
        ),
    ] = False,
    dump: Annotated[
        str | None,
        typer.Option(
            metavar="SIGNAL",
            help="If the job stands still, send this signal to its ranks, which must have "
            "registered faulthandler for it, and read the stacks that they write: USR1, for "
            "example. It is the only option that changes the job.",
        ),
    ] = None,
    dump_anyway: Annotated[
        bool,
        typer.Option("--dump-anyway", help="With --dump: also if the job may still progress."),
    ] = False,
    html: o.Html = None,
    out: o.Out = None,
    as_json: o.Json = False,
    details: o.Details = False,
    no_color: o.NoColor = False,
    debug: o.Debug = False,  # noqa: ARG001 - main takes it out
) -> None:
    """Look at a job that runs now and was started without moediag; report whether it hangs, and
    why.

    The job continues as before: no signal is sent and nothing is loaded into it. Without PID, takes
    your only training job on this machine, or lists them.
    """
    chosen = o.views(as_json, html=html)
    from moediag.launch.attach.collecting import AttachOptions
    from moediag.pipeline import attach as attaching
    from moediag.report import consoles, json_view, page, terminal, views

    typed = context.get_parameter_source("redact")
    if redact and collect is None and typed is not None and typed.name == "COMMANDLINE":
        raise UsageError("--redact needs --collect", "Add: --collect out.tgz")
    options = AttachOptions(patience, not no_locals, _signal(dump), dump_anyway)

    def progress(text: str) -> None:
        stderr.line(f"moediag: {text}")

    elsewhere = {"--slurm": slurm, "--hosts": hosts, "--kubectl": kubectl}
    given = [(name, value) for name, value in elsewhere.items() if value is not None]
    if dump_anyway and dump is None:
        raise UsageError("--dump-anyway needs --dump", "Add: --dump USR1")
    if given and dump is not None:
        raise UsageError(f"--dump and {given[0][0]} exclude each other", "Run it on each machine.")
    if len(given) + (pid is not None) > 1:
        raise UsageError("give a PID, --slurm, --hosts or --kubectl: only one of them")
    if given:
        done = _on_machines(*given[0], options, out, progress)
    else:
        job = attaching.choose(pid)
        progress(f"looking at {attaching.described(job)}")
        if options.dump is not None:
            when = "now" if dump_anyway else "if the job stands still"
            progress(f"{options.dump.name} will be sent to its ranks, {when}: each that has a "
                     "handler runs it")  # fmt: skip
        done = attaching.attach(job, options, out, progress)
    if collect is not None:
        attaching.write_archive(done, collect, redact)
        stderr.line(f"wrote {collect}")
    for told in views.write([done.result], chosen, dict):
        stderr.line(told)
    if as_json:
        stdout.write(json_view.render(done.result))
    elif Path("-") not in chosen.values():
        terminal.render(done.result, consoles.output(no_color), views.short(done.folder), details)
    raise typer.Exit(page.exit_code(done.result))
