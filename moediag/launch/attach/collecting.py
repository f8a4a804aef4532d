"""Collects the evidence of a running job into a folder, as :mod:`moediag.evidence.attached_job`
reads it."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from moediag import protocol
from moediag.evidence import looks
from moediag.evidence.looks import Looks
from moediag.launch.attach import gpus, listeners, signal_dump, spy
from moediag.launch.attach.found_jobs import Job, Rank
from moediag.launch.attach.looking import LookingJob, Target
from moediag.launch.attach.proc import Proc
from moediag.launch.capture import source_files, worker_stacks
from moediag.launch.capture.collect import CAPTURE_FOLDER
from moediag.launch.capture.py_spy import main_frames
from moediag.launch.processes import Process
from moediag.protocol import AttachTask, Trial
from moediag.records import dataclass

_TOOL = 10.0  # seconds for one tool
_GPUS = 4.0  # seconds for nvidia-smi
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
UNNUMBERED = "the processes do not say which rank they are: they are numbered by their pids"


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """How to look."""

    patience: float = 30.0
    """Seconds after which ranks that wait are called hung."""
    local_values: bool = True
    """Read numbers from local variables."""
    dump: signal.Signals | None = None
    """With the user's permission: the signal on which ranks write their stacks."""
    dump_anyway: bool = False
    """Ask for dumps also in a job that may still progress."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What was collected, and what was not."""

    trial: Trial
    looks: Looks
    not_seen: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def collect(
    job: Job, folder: Path, options: AttachOptions, progress: Callable[[str], None]
) -> Collected:
    """Looks at ``job`` and writes what it finds into ``folder``, a new one."""
    capture = folder / CAPTURE_FOLDER
    capture.mkdir(parents=True, exist_ok=True)
    proc = Proc()
    job, unnumbered, unread = numbered(job, proc)
    targets = [Target(r.rank or 0, Process(r.pid, r.started)) for r in job.ranks]
    known = Looks(
        0.0, options.patience, {}, job.world_size, socket.gethostname(), job.missing, job.launcher,
        _token(job),
    )  # fmt: skip
    looked = LookingJob(targets, options.patience, proc, options.local_values)
    found, no_gpus = with_gpus(looked.run(known, progress), proc)
    dumps = looked.dumps()
    for rank, dump in dumps.items():
        if dump.json:
            (capture / f"rank-{rank}.pyspy.json").write_bytes(spy.without_text(dump.json))
    lost = [*unread, *_lost(dumps, found), *looked.lost()]
    if found.stands or options.dump_anyway:
        lost += listeners.ask(folder, capture, targets, proc)
    if no_gpus and not any("nvidia-smi" in text for text in lost):
        lost.append(no_gpus)
    if options.dump is not None and (found.stands or found.quiet or options.dump_anyway):
        lost += signal_dump.ask(folder, targets, options.dump, proc)
        found = signal_dump.waiting(found, folder)
    elif options.dump is not None:
        lost.append(f"stacks on {options.dump.name} (not sent: the job may still progress)")
    _workers(capture, targets, dumps)
    processes = {target.rank: target.process for target in targets}
    source_files.keep(folder, processes)
    protocol.write_json(folder / protocol.LOOKS_FILE, asdict(found))
    for rank in processes:
        name = {"job": known.job, "node": None, "store": None, "python": ""}
        protocol.write_json(folder / protocol.job_file(rank), name)
    trial = Trial(
        name=folder.name, scenario=job.name, variant="attached", task=AttachTask(),
        world_size=job.world_size, backend="", launcher=job.launcher,
    )  # fmt: skip
    trial.write(folder)
    if lost:
        protocol.write_text(folder / protocol.NOT_SEEN_FILE, "\n".join(lost))
    return Collected(trial, found, tuple(lost), (UNNUMBERED,) if unnumbered else ())


def with_gpus(found: Looks, proc: Proc) -> tuple[Looks, str]:
    """``found`` with how busy the GPUs of its ranks are, and why that is not known."""
    users = {rank: look for rank, look in found.ranks.items()
             if look.does != looks.GONE and proc.maps(look.pid, b"/dev/nvidia")}  # fmt: skip
    if not users:
        return found, ""
    busy, why = gpus.busy({look.pid for look in users.values()}, _GPUS)
    told = {rank: replace(look, gpu=busy.get(look.pid)) for rank, look in users.items()}
    return replace(found, ranks={**found.ranks, **told}), why


def _token(job: Job) -> str:
    """The same for all machines of one start of the job."""
    key = "\0".join((*job.ranks[0].key, str(job.world_size)))
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def numbered(job: Job, proc: Proc) -> tuple[Job, bool, list[str]]:
    """``job`` with a number for each rank, whether nothing tells these numbers, and which processes
    could not be read. Processes beside those that say which rank they are were not ranks."""
    if all(one.rank is not None for one in job.ranks):
        return job, False, []
    told: dict[int, Rank] = {}
    unread = []
    for one in job.ranks:
        seen = proc.seen(one.pid)
        dump = spy.dump(one.pid, _TOOL, pause=seen is None or seen.state not in "ST")
        rank = spy.rank_of(dump.json) if dump.json else None
        if rank is not None:
            told.setdefault(rank, one)
        elif not dump.json:
            state = " It is stopped (SIGSTOP)." if seen is not None and seen.state == "T" else ""
            unread.append(
                f"process {one.pid}, which may be a rank: its stack ({dump.lost}).{state}"
            )
    if told:
        ranks = tuple(replace(told[rank], rank=rank) for rank in sorted(told))
        return replace(job, ranks=ranks), False, unread
    by_pid = tuple(replace(one, rank=at) for at, one in enumerate(job.ranks))
    return replace(job, ranks=by_pid), len(by_pid) > 1, []


def _lost(dumps: Mapping[int, spy.Dump], found: Looks) -> Iterator[str]:
    """Ranks whose stacks could not be read, and the one setting that would help."""
    reasons: dict[str, None] = {}
    for rank, dump in sorted(dumps.items()):
        if dump.lost and found.ranks[rank].does != looks.GONE:
            reasons[dump.lost] = None
            yield f"rank {rank}: Python stack ({dump.lost})"
    if spy.NO_TOOL in reasons:
        yield "Python stacks: install py-spy beside moediag (pip install py-spy)"
    if spy.REFUSED in reasons:
        yield f"Python stacks: {setting()}"


def setting() -> str:
    """The one setting that would let py-spy read the ranks."""
    try:
        scope = _YAMA.read_text(encoding="ascii").strip()
    except OSError:
        scope = ""
    if scope in ("1", "2") and os.geteuid() != 0:
        return (
            f"kernel.yama.ptrace_scope is {scope}; `sudo sysctl kernel.yama.ptrace_scope=0` lets "
            "you read your own processes, or run moediag as root"
        )
    if scope == "3":
        return "kernel.yama.ptrace_scope is 3, which forbids it until the machine restarts"
    return (
        "in a container, start it with --cap-add SYS_PTRACE; else run moediag as the owner of the "
        "job, or as root"
    )


def _workers(capture: Path, targets: Sequence[Target], dumps: Mapping[int, spy.Dump]) -> None:
    """Writes the stacks of the loader processes of ranks that wait for data."""
    for target in targets:
        if worker_stacks.waits_for_data(main_frames(dumps[target.rank].json)):
            for pid in worker_stacks.children(target.process.pid):
                dump = spy.dump(pid, _TOOL, local_values=False)
                if dump.json:
                    worker_stacks.file_of(capture, target.rank, pid).write_bytes(dump.json)
