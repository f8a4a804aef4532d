"""One rank's recorder log (``rank-N.events.jsonl``) as plain data.

The rank may have been killed at any moment, so the file may have a truncated last line, garbage
between lines, references to a name list that was never written, or events of a later version. What
cannot be used is counted and listed in ``not_seen``; the rest is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moediag.evidence.model import (
    BatchCount,
    Collective,
    Decision,
    Finding,
    Group,
    HeldWeights,
    Left,
    PassedCondition,
    RankError,
    TokenCount,
)
from moediag.protocol import EVENT_KINDS, ExpertRows, events_file, read_stored
from moediag.protocol.names import plain_name

Names = dict[tuple[str, ...], tuple[str, ...]]  # one object per name list, shared by all ranks

_MOST_EXPERTS = 1_000_000  # of a layer; more is no real number


@dataclass(slots=True)
class RankLog:
    """What one rank's log says."""

    rank: int
    world_size: int | None = None
    backend: str = ""
    versions: dict[str, str | None] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()  # folders of installed packages and the standard library
    groups: dict[str, Group] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)
    tokens: list[TokenCount] = field(default_factory=list)
    no_gradient: dict[int, tuple[str, ...]] = field(default_factory=dict)
    weights: list[HeldWeights] = field(default_factory=list)
    experts_used: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    #: Paths of the user's files that made calls.
    files: list[str] = field(default_factory=list)
    batches: list[BatchCount] = field(default_factory=list)
    handling: RankError | None = None
    thread_errors: list[RankError] = field(default_factory=list)
    left: Left | None = None
    tested: dict[str, PassedCondition] = field(default_factory=dict)
    last_phase: str = ""
    restart: int | None = None
    #: What its launcher told all ranks of one run alike; "" without a launcher.
    run: str = ""
    #: When the recorder started, and the time of the last event; seconds since the epoch, 0 if
    #: unknown.
    started: float = 0.0
    last: float = 0.0
    error: RankError | None = None
    finished: bool = False
    not_seen: list[str] = field(default_factory=list)
    #: Valid lines.
    lines: int = 0
    #: Lines that are not events.
    garbage: int = 0
    #: The last line has no end, as is normal for a killed rank.
    truncated: bool = False


def read_log(folder: Path, rank: int, intern: Names | None = None, alone: bool = False) -> RankLog:
    """The log of ``rank`` in ``folder``, its older segment first.

    Never raises for a file's content; without a file the log is empty and ``not_seen`` says so,
    unless the rank is ``alone``: one process needs no collectives. ``intern`` shares equal name
    lists between ranks.
    """
    log = RankLog(rank)
    reader = _Reader(log, {} if intern is None else intern)
    segments = _segments(folder, rank)
    for path in segments:
        _read_segment(path, reader)
    if not segments:
        if not alone:
            log.not_seen.append(f"rank {rank}: its collectives (there is no recorder log)")
    elif not (log.lines or log.garbage or log.truncated):
        log.not_seen.append(f"rank {rank}: its collectives (the recorder log is empty)")
    if log.garbage:
        unit = "line" if log.garbage == 1 else "lines"
        log.not_seen.append(f"rank {rank}: {log.garbage} unreadable {unit} of its recorder log")
    if log.truncated:
        log.not_seen.append(f"rank {rank}: its last event (the recorder log is truncated)")
    return log


def _segments(folder: Path, rank: int) -> list[Path]:
    """The rank's ``rank-N.events*.jsonl``, the newest one last."""
    current = folder / events_file(rank)
    older = sorted(p for p in folder.glob(f"rank-{rank}.events*") if p != current)
    return [*older, *([current] if current.exists() else [])]


def _read_segment(path: Path, reader: _Reader) -> None:
    try:
        raw = read_stored(path)
    except OSError as error:
        reader.log.not_seen.append(f"rank {reader.log.rank}: {path.name} ({error.strerror})")
        return
    whole, _, rest = raw.rpartition(b"\n")
    reader.read(whole.splitlines())
    if rest:
        # Only the newline may be missing.
        before = reader.log.garbage
        reader.read([rest])
        reader.log.truncated = reader.log.garbage > before
        reader.log.garbage = before


class _Reader:
    """Keeps what later lines refer to: name lists, and the place of each call."""

    def __init__(self, log: RankLog, intern: Names) -> None:
        self.log = log
        self.intern = intern
        self.lists: dict[int, tuple[str, ...]] = {}
        self.at: dict[int, int] = {}
        self.handlers = {kind: getattr(self, kind) for kind in EVENT_KINDS}

    def read(self, lines: Iterable[bytes | str]) -> None:
        event: dict[str, Any] = {}
        for line in lines:
            if not line.strip():
                continue
            try:
                event = json.loads(line)
                handler = self.handlers.get(event["e"])
                if handler is not None:  # else an event of a later version
                    handler(event)
                self.log.lines += 1
            except (
                ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError,
            ):  # fmt: skip
                self.log.garbage += 1
        at = event.get("t") if isinstance(event, dict) else None
        self.log.last = float(at) if isinstance(at, (int, float)) else self.log.last

    def start(self, event: Mapping[str, Any]) -> None:
        self.log.world_size = int(event["world_size"])
        self.log.backend = str(event.get("backend") or "")
        folders = tuple(str(folder) for folder in event.get("libraries") or ())
        self.log.libraries = self.intern.setdefault(folders, folders)
        restart = event.get("restart")
        self.log.restart = restart if isinstance(restart, int) else None
        self.log.run = str(event.get("run") or "")
        self.log.started = float(event.get("t") or 0.0)
        self.versions(event)

    def versions(self, event: Mapping[str, Any]) -> None:
        for package in ("python", "torch", "transformers", "accelerate", "deepspeed", "nccl"):
            if package in event:
                version = event[package]
                self.log.versions[package] = None if version is None else str(version)

    def file(self, event: Mapping[str, Any]) -> None:
        self.log.files.append(str(event["path"]))

    def group(self, event: Mapping[str, Any]) -> None:
        name = str(event["group"])
        self.log.groups[name] = Group(
            name=name,
            ranks=tuple(int(r) for r in event.get("ranks") or ()),
            axis=_text(event.get("axis")),
            desc=str(event.get("desc") or ""),
            backend=str(event.get("backend") or ""),
        )

    def names(self, event: Mapping[str, Any]) -> None:
        fqns = tuple(plain_name(fqn) for fqn in event["fqns"])
        self.lists[int(event["id"])] = self.intern.setdefault(fqns, fqns)

    def collective(self, event: Mapping[str, Any]) -> None:
        carried = self.resolve(event.get("carries"))
        everything = self.resolve(event.get("of"))
        missing: tuple[str, ...] = ()
        if carried is not None and everything is not None and carried is not everything:
            there = set(carried)
            missing = tuple(fqn for fqn in everything if fqn not in there)
        index = int(event["n"])
        peer = event.get("peer")
        call = Collective(
            index=index,
            group=str(event["group"]),
            position=int(event["k"]),
            op=str(event["op"]),
            numel_in=int(event.get("numel_in") or 0),
            numel_out=int(event.get("numel_out") or 0),
            dtype=str(event.get("dtype") or "").removeprefix("torch."),
            phase=str(event.get("phase") or "other"),
            module=plain_name(event.get("module") or ""),
            step=int(event.get("step") or 0),
            splits_in=_splits(event.get("splits_in")),
            splits_out=_splits(event.get("splits_out")),
            peer=None if peer is None else int(peer),
            tag=int(event.get("tag") or 0),
            members=_splits(event.get("members")),
            reduce=_text(event.get("reduce")),
            parameters=carried,
            parameters_missing=missing,
            site=str(event.get("site") or ""),
            callers=self.resolve(event.get("callers")) or (),
            time=float(event.get("t") or 0.0),
            asynchronous=bool(event.get("async")),
        )
        self.log.left = None  # the program caught its exit
        self.at[index] = len(self.log.collectives)
        self.log.collectives.append(call)

    def done(self, event: Mapping[str, Any]) -> None:
        at = self.at.get(int(event["n"]))
        if at is not None:
            self.log.collectives[at] = replace(self.log.collectives[at], completed=True)

    def failed(self, event: Mapping[str, Any]) -> None:
        at = self.at.get(int(event["n"]))
        if at is not None:
            text = f"{event.get('type') or 'Exception'}: {event.get('message') or ''}"
            self.log.collectives[at] = replace(self.log.collectives[at], failed=text)

    def tokens(self, event: Mapping[str, Any]) -> None:
        counts = tuple(int(c) for c in event["counts"])
        layer = plain_name(event["layer"])
        self.log.tokens.append(TokenCount(int(event.get("step") or 0), layer, counts))

    def no_gradient(self, event: Mapping[str, Any]) -> None:
        self.log.no_gradient[int(event["step"])] = self.resolve(event["names"]) or ()

    def weights(self, event: Mapping[str, Any]) -> None:
        unequal = event.get("unequal") or ()
        instead = unequal.items() if isinstance(unequal, dict) else ()
        self.log.weights.append(
            HeldWeights(
                when=str(event["when"]),
                experts=tuple(_expert_rows(row) for row in event["experts"]),
                unequal=tuple(plain_name(fqn) for fqn in unequal),
                instead={plain_name(fqn): str(t) for fqn, t in instead if t},
                compared=int(event.get("compared") or 0),
                asked=int(event.get("asked") or 1),
                whole=_experts(event.get("whole") or 0),
                left_out=bool(event.get("left_out")),
            )
        )

    def experts_used(self, event: Mapping[str, Any]) -> None:
        for fqn, rows in event["rows"].items():
            self.log.experts_used[plain_name(fqn)] = int(rows)

    def note(self, event: Mapping[str, Any]) -> None:
        self.log.notes.append(str(event["text"]))

    def phase(self, event: Mapping[str, Any]) -> None:
        self.log.last_phase = str(event["name"])

    def finding(self, event: Mapping[str, Any]) -> None:
        # A newer segment of the log repeats it.
        what, text = str(event["what"]), str(event["text"])
        details = event.get("details")
        found = Finding(
            what, text, int(event.get("step") or 0), details if isinstance(details, dict) else {}
        )
        self.log.findings.setdefault((what, text), found)

    def decision(self, event: Mapping[str, Any]) -> None:
        value = event["value"]
        if isinstance(value, list):
            value = tuple(str(name) for name in value)
        elif not isinstance(value, str):
            value = float(value)
        at = float(event.get("t") or 0.0)
        step = int(event.get("step") or 0)
        self.log.decisions.append(Decision(str(event["what"]), value, step, at))

    def batches(self, event: Mapping[str, Any]) -> None:
        ended = bool(event.get("ended"))
        count = BatchCount(str(event["line"]), int(event["number"]), ended)
        if self.log.batches and not self.log.batches[-1].ended:
            self.log.batches.pop()  # the same loader, examined before
        self.log.batches.append(count)

    def handling(self, event: Mapping[str, Any]) -> None:
        self.log.handling = _error(event)

    def thread_error(self, event: Mapping[str, Any]) -> None:
        self.log.thread_errors.append(_error(event))

    def leaves(self, event: Mapping[str, Any]) -> None:
        site, callers = str(event["site"]), self.resolve(event.get("callers")) or ()
        own = {path.rpartition("/")[2] for path in self.log.files}
        lines = tuple(line for line in (site, *callers) if line.partition(":")[0] in own)
        self.log.left = Left(str(event["how"]), lines) if lines else None

    def conditions(self, event: Mapping[str, Any]) -> None:
        """The newest examination counts, and of one line in several frames the innermost."""
        self.log.tested = {
            f"{test['file']}:{int(test['line'])}": PassedCondition(
                bool(test["holds"]), {str(n): str(v) for n, v in test["values"].items()}
            )
            for test in reversed(event["tests"])
        }

    def not_seen(self, event: Mapping[str, Any]) -> None:
        self.log.not_seen.append(str(event["text"]))

    def error(self, event: Mapping[str, Any]) -> None:
        self.log.error = _error(event)

    def end(self, event: Mapping[str, Any]) -> None:
        self.log.finished = bool(event)

    def resolve(self, number: Any) -> tuple[str, ...] | None:
        """The names with this id; None without an id, or if their line was lost.

        Raises ValueError or TypeError for an invalid id.
        """
        return None if number is None else self.lists.get(int(number))


def _text(value: Any) -> str | None:
    return str(value) if value else None


def _error(event: Mapping[str, Any]) -> RankError:
    names = ("message", "where", "thread")
    message, where, thread = (str(event.get(name) or "") for name in names)
    kind, at = str(event.get("type") or "Exception"), float(event.get("t") or 0.0)
    return RankError(kind, message, where, at, thread=thread)


def _expert_rows(row: Mapping[str, Any]) -> ExpertRows:
    """Raises ValueError, TypeError or KeyError for invalid rows."""
    held, declared = [int(e) for e in row["held"]], [int(e) for e in row["declared"]]
    if len(held) != len(declared):
        raise ValueError(f"{len(held)} rows, {len(declared)} declared")
    first, should = (None if row.get(k) is None else float(row[k]) for k in ("first", "should"))
    return ExpertRows(
        fqn=plain_name(row["fqn"]),
        held=held,
        declared=declared,
        rows=int(row["rows"]),
        placement=str(row.get("placement") or "plain"),
        first=first,
        should=should,
        experts=None if row.get("experts") is None else _experts(row["experts"]),
    )


def _experts(value: Any) -> int:
    """Raises ValueError or TypeError for what is no number of experts."""
    if not 0 <= (count := int(value)) <= _MOST_EXPERTS:
        raise ValueError(f"{count} experts")
    return count


def _splits(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(int(v) for v in value)
