"""A trial's folder as `Evidence`: the one module that knows which file holds what.

Every file may be missing, empty or truncated, because a rank can be killed at any moment. What is
lost is listed in ``not_seen``; only a missing folder is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moediag import protocol
from moediag.errors import EvidenceError
from moediag.evidence import (
    attached_job,
    device_progress,
    exits,
    looks,
    nodes,
    rank_stacks,
    tracebacks,
)
from moediag.evidence.events import Names, RankLog, read_log
from moediag.evidence.launch_record import LaunchRecord, read_launch
from moediag.evidence.law_model import LawCheck
from moediag.evidence.law_records import read_laws
from moediag.evidence.line_conditions import Sources
from moediag.evidence.model import (
    ISSUED,
    STARTED_THERE,
    Collective,
    Evidence,
    Meeting,
    RankEvidence,
    Stack,
    Stall,
)
from moediag.protocol import MOST_RANKS, Outcome, parse_json, read_stored

CAPTURE = "capture"
SOURCE_FILE = "source.json"  # written by launch.capture.source_files
# Title -> file, written by launch.machine.
ATTACHED = {"nvidia-smi": "nvidia-smi.txt", "NCCL's RAS": "nccl-ras.txt"}
MOST_ATTACHED = 20_000  # characters of each
_RANK_FILE = re.compile(r"^rank-(\d{1,7})\.")
_ATTEMPTS = 3  # in whose saves the state of a restart is looked for
_LONG = 30.0  # seconds in which a device completes any call that its peers also made
_BETWEEN_RUNS = 600.0  # seconds; ranks of one run start closer together


def read_trial(folder: Path, *beside: Path) -> Evidence:
    """The evidence in ``folder``, merged with that of other nodes' folders ``beside`` it.

    Raises EvidenceError if ``folder`` is not a folder.
    """
    parts = []
    for one in (folder, *beside):
        known, places = nodes.read_nodes(one)
        parts.append(nodes.Part(_read(one), known))
        parts += [nodes.Part(_read(place)) for place in places]
    several = len(parts) > 1 or any(part.nodes for part in parts)
    return nodes.merged(parts) if several else parts[0].evidence


def _read(folder: Path) -> Evidence:
    if not folder.is_dir():
        raise EvidenceError(
            f"{folder}: no such folder", "Give a trial's folder inside a run directory."
        )
    trial = _json(folder / protocol.TRIAL_FILE)
    task = protocol.task_fields(trial)
    if task["kind"] == "attach":
        return _attached_job(folder, trial)
    launch = read_launch(folder / protocol.LAUNCH_FILE)
    present = _ranks_present(folder) | set(launch.exits)
    declared = trial.get("world_size") or None  # 0: of a watched job, before its ranks started
    world_size = declared if isinstance(declared, int) else max(present, default=-1) + 1
    if max(world_size, *present, 0) > MOST_RANKS:
        raise EvidenceError(f"{folder}: it names rank {max(world_size - 1, *present, 0)}")
    intern: Names = {}
    logs = {
        rank: read_log(folder, rank, intern, alone=world_size == 1)
        for rank in sorted(present | set(range(world_size)))
    }
    earlier = _of_earlier_runs(logs) if trial.get("variant") == protocol.LAWS_VARIANT else {}
    logs = {rank: log for rank, log in logs.items() if rank not in earlier}
    if not isinstance(declared, int):
        world_size = max([world_size, *(log.world_size or 0 for log in logs.values())])
    # Where a device runs the calls, torch's Flight Recorder knows more of these.
    backends = {
        rank: {group.backend for group in log.groups.values()} for rank, log in logs.items()
    }
    dumps = device_progress.read(folder, [r for r, has in backends.items() if has - {"", "gloo"}])
    # A rank that died before it recorded any runs the same installation as the others.
    libraries = next((log.libraries for log in logs.values() if log.libraries), ())
    one_node = _on_one_node(folder, logs, world_size)
    sources, lost = _sources(folder / CAPTURE / SOURCE_FILE, world_size, one_node)
    ranks = {
        rank: _rank(folder, log, launch, libraries, _device(log, dumps.get(rank)), sources)
        for rank, log in logs.items()
    }
    ranks |= {rank: RankEvidence(rank, not_seen=(text,)) for rank, text in earlier.items()}
    backend = str(trial.get("backend") or next(_backends(logs.values()), ""))
    stall = _held(launch.stall, ranks) if launch.stall else _on_devices(launch, ranks)
    return Evidence(
        world_size=world_size,
        ranks=ranks,
        backend=backend,
        stall=stall,
        timed_out=launch.timed_out and stall is None,
        launch_error=launch.launch_error,
        interrupted=launch.interrupted,
        deaths=tuple(death.rank for death in launch.deaths),
        noticed={death.rank: death.time for death in launch.deaths},
        program=str(task.get("name", "")) if task["kind"] == "program" else "",
        not_seen=(*launch.not_seen, *lost),
        oom_kills=launch.oom_kills,
        watched=task["kind"] == "watch",
        layout=_layout(trial.get("layout")),
        attached=_attached(folder / CAPTURE),
        sources=sources.files,
        one_node=one_node,
        earlier=_earlier(folder, ranks) if task["kind"] == "watch" else {},
    )


def _on_devices(launch: LaunchRecord, ranks: Mapping[int, RankEvidence]) -> Stall | None:
    """The stall of a job that its time limit ended while the device of each rank had long been in a
    call. Stacks need not show it: a thread may wait for the device anywhere."""
    calls = [call for seen in ranks.values() for call in seen.collectives]
    devices = all(
        any(
            call.on_device == STARTED_THERE and call.op not in ("send", "recv")  # posted early
            for call in seen.collectives
        )
        for seen in ranks.values()
    )
    newest = max((call.time for call in calls), default=launch.ended)
    quiet = launch.ended - newest
    if not launch.timed_out or not devices or quiet < _LONG:
        return None
    return Stall(newest - launch.started, round(quiet, 1), tuple(sorted(ranks)))


def _held(stall: Stall, ranks: Mapping[int, RankEvidence]) -> Stall:
    """``stall``, where ranks also wait whose device has not completed a call and whose stack waits
    for the device, as in ``destroy_process_group``."""
    held = {
        rank
        for rank in stall.elsewhere
        if rank in ranks  # other nodes have their own evidence
        and any(c.on_device in (ISSUED, STARTED_THERE) for c in ranks[rank].collectives)
        and rank_stacks.waits_for_device(ranks[rank].stacks)
    }
    waiting = tuple(sorted({*stall.waiting, *held}))
    return replace(
        stall, waiting=waiting, elsewhere=tuple(r for r in stall.elsewhere if r not in held)
    )


def _earlier(folder: Path, ranks: Iterable[int]) -> dict[int, tuple[LawCheck, ...]]:
    """What ranks kept of their states after saves in the attempts before this one."""
    number = folder.name.removeprefix(protocol.attempt_folder(0)[:-1])
    if not number.isdecimal():
        return {}
    first = max(0, int(number) - _ATTEMPTS)
    before = [folder.with_name(protocol.attempt_folder(n)) for n in range(first, int(number))]
    found = {}
    for rank in ranks if any(one.is_dir() for one in before) else ():
        laws = [read_laws(one, rank)[0] for one in before]
        found[rank] = tuple(check for own in laws if own is not None for check in own.kept)
    return found


def _of_earlier_runs(logs: Mapping[int, RankLog]) -> dict[int, str]:
    """Ranks whose log was left by an earlier run in the same folder, with a note for the page: the
    run has another name, or the log ended long before the newest one began."""
    newest = max(logs.values(), key=lambda log: log.started, default=None)
    return {
        rank: (
            f"rank {rank}: its record (it is of another run, or ended long before the newest began)"
        )
        for rank, log in logs.items()
        if newest is not None
        and log.started
        and (
            (log.run and newest.run and log.run != newest.run)
            or log.last < newest.started - _BETWEEN_RUNS
        )
    }


def _attached_job(folder: Path, trial: dict[str, Any]) -> Evidence:
    capture, size = folder / CAPTURE, trial.get("world_size")
    seen = looks.read(folder)
    here = seen is not None and not seen.elsewhere
    kept, lost = _sources(capture / SOURCE_FILE, size if isinstance(size, int) else 0, here)
    lost = (*_text(folder / protocol.NOT_SEEN_FILE).splitlines(), *lost)
    return attached_job.read(folder, capture, kept, _attached(capture), lost)


def _attached(folder: Path) -> dict[str, str]:
    """Text of the attached files by title, shortened for a page."""
    found = {title: _text(folder / name).strip() for title, name in ATTACHED.items()}
    return {
        title: text if len(text) <= MOST_ATTACHED else f"{text[:MOST_ATTACHED]}\n(cut here)"
        for title, text in found.items()
        if text
    }


def _backends(logs: Iterable[RankLog]) -> Iterator[str]:
    """Backends as the ranks recorded them, then those of their groups."""
    for log in logs:
        if log.backend:
            yield log.backend
        yield from (group.backend for group in log.groups.values() if group.backend)


def _layout(value: Any) -> dict[str, int]:
    """The trial's layout, or empty."""
    if not isinstance(value, dict):
        return {}
    return {str(a): n for a, n in value.items() if isinstance(n, int) and not isinstance(n, bool)}


def _rank(
    folder: Path,
    log: RankLog,
    launch: LaunchRecord,
    libraries: tuple[str, ...],
    told: device_progress.Told,
    sources: Sources,
) -> RankEvidence:
    rank = log.rank
    libraries = log.libraries or libraries
    output = exits.tail(folder / protocol.output_file(rank))
    outcome, lost = _outcome(folder, rank)
    omitted = outcome.not_seen if outcome is not None else ()
    laws, lost_laws = read_laws(folder, rank)
    filed = exits.read_error_file(folder / protocol.error_file(rank), libraries)
    own = tracebacks.unwrapped(log.error, libraries) if log.error is not None else None
    error = own or filed
    if own is not None and filed is not None and filed.type == own.type:
        # In our own trials every frame belongs to a library, so the place is the recorder's,
        # which skips frames of torch only.
        of_user = rank_stacks.of_user(filed.frames, libraries)
        where = filed.where if of_user or filed.message != own.message else own.where
        error = replace(filed, where=where or own.where, time=own.time)
    if error is None and not log.finished:
        error = exits.error_in_output(output, libraries)
    stacks = _stacks(folder, rank)
    conditions, unusable = sources.conditions((f for s in stacks for f in s.frames), rank)
    made = dict.fromkeys(line for c in log.collectives for line in (c.site, *c.callers))
    made |= dict.fromkeys(log.left.lines if log.left is not None else ())
    conditions = {**sources.of_lines(made, log.files, rank), **conditions}
    versions = dict(log.versions)
    if told.library and not versions.get("nccl"):
        versions["nccl"] = told.library
    told_by_log = ((name, getattr(log, name)) for name in _KEPT)
    kept: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in told_by_log}
    return RankEvidence(
        rank=rank,
        **kept,
        collectives=_waited_in(told.calls, folder / protocol.heartbeat_file(rank)),
        findings=tuple(log.findings.values()),
        workers=rank_stacks.read_workers(folder / CAPTURE, rank),
        stacks=stacks,
        exit=launch.exits.get(rank),
        error=error,
        outcome=outcome,
        versions=versions,
        libraries=libraries,
        alone=_alone(folder / protocol.alone_file(rank)),
        meeting=_meeting(folder / protocol.meeting_file(rank)),
        not_seen=(
            *log.not_seen,
            *lost,
            *lost_laws,
            *told.not_seen,
            *(
                f"source of {name} (it is not what ran, or not Python that moediag can read)"
                for name in unusable
            ),
            *omitted,
        ),
        laws=laws,
        conditions=conditions,
        user_files=frozenset(path.rpartition("/")[2] for path in log.files),
        last_lines=exits.last_lines(output),
        os_state=_os_state(_text(folder / CAPTURE / f"rank-{rank}.proc.txt")),
    )


# Fields of a rank's log that are evidence as they are.
_KEPT = (
    "groups", "tokens", "no_gradient", "weights", "experts_used", "notes", "decisions", "batches",
    "handling", "thread_errors", "left", "tested", "last_phase", "restart", "finished",
)  # fmt: skip


def _alone(path: Path) -> tuple[str, ...] | None:
    names = _json(path).get("optimizers")
    return tuple(str(name) for name in names) if isinstance(names, list) else None


def _meeting(path: Path) -> Meeting:
    raw = _json(path)
    size = raw.get("world_size")
    texts = (raw.get("backend"), raw.get("address"))
    backend, address = (text if isinstance(text, str) else "" for text in texts)
    return Meeting(backend, address, size if isinstance(size, int) else 0)


def _device(log: RankLog, read: device_progress.RankDump | None) -> device_progress.Told:
    """The rank's calls with what torch's Flight Recorder knows of them."""
    calls = tuple(log.collectives)
    if read is None or read.dump is None:
        return device_progress.Told(calls, not_seen=read.lost if read is not None else ())
    return device_progress.told(calls, read.dump, log.rank)


def _waited_in(calls: tuple[Collective, ...], heartbeat: Path) -> tuple[Collective, ...]:
    """The rank's calls; the one that its heartbeat says it is inside of is one that it waits for.

    This also holds for a call issued as asynchronous: ``dist.recv`` is such a call and a wait.
    """
    beat = protocol.Heartbeat.read(heartbeat)
    if beat is None or beat.state != "in-collective":
        return calls
    inside = beat.collective
    return tuple(
        replace(c, asynchronous=False) if c.index == inside and c.asynchronous else c for c in calls
    )


def _on_one_node(folder: Path, ranks: Iterable[int], world_size: int) -> bool:
    """Whether each rank was told that its node has all ranks of the job."""
    told = (_json(folder / protocol.pid_file(rank)).get("local_ranks") for rank in ranks)
    return all(count == world_size for count in told)


def _sources(path: Path, world_size: int, one_node: bool) -> tuple[Sources, tuple[str, ...]]:
    """The source files that were kept, and what was not."""
    raw = _json(path)
    files, lost = raw.get("files"), raw.get("lost")
    kept = {str(p): text for p, text in files.items()} if isinstance(files, dict) else {}
    missing = lost.items() if isinstance(lost, dict) else ()
    texts = tuple(f"source of {str(p).rpartition('/')[2]} ({reason})" for p, reason in missing)
    return Sources(kept, world_size, one_node), texts


def _os_state(text: str) -> str:
    """The state letter in a /proc/PID/status, from ``State:\tT (stopped)``."""
    found = re.search(r"^State:\s*(\w)", text, re.MULTILINE)
    return found[1] if found else ""


def _outcome(folder: Path, rank: int) -> tuple[Outcome | None, tuple[str, ...]]:
    try:
        return Outcome.read(folder / protocol.outcome_file(rank)), ()
    except FileNotFoundError:
        return None, ()
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None, (f"rank {rank}: what it measured (its outcome file is unreadable)",)


def _stacks(folder: Path, rank: int) -> tuple[Stack, ...]:
    capture = folder / CAPTURE
    found: list[Stack] = []
    found += rank_stacks.parse_pyspy(_text(capture / f"rank-{rank}.pyspy.json"))
    found += rank_stacks.parse_pyspy_text(_text(capture / f"rank-{rank}.native.txt"))
    found += rank_stacks.parse_pystack(_text(capture / f"rank-{rank}.pystack.txt"))
    found += rank_stacks.parse_faulthandler(_text(folder / protocol.stacks_file(rank)))
    return tuple(found)


def _ranks_present(folder: Path) -> set[int]:
    names = (path.name for path in folder.iterdir())
    return {int(match[1]) for name in names if (match := _RANK_FILE.match(name))}


def _text(path: Path) -> str:
    try:
        return read_stored(path).decode("utf-8", "replace")
    except OSError:
        return ""


def _json(path: Path) -> dict[str, Any]:
    try:
        raw = parse_json(_text(path))
    except ValueError:
        return {}
    return raw if isinstance(raw, dict) else {}
