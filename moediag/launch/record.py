"""The record of one launch, written as ``launch.json``."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from moediag.errors import EvidenceError
from moediag.evidence.model import ExitStatus, Stall
from moediag.protocol import LAUNCH_FILE, read_json, write_json
from moediag.records import dataclass

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Death:
    """A rank that failed by itself."""

    rank: int
    time: float
    """Epoch seconds: the exact time in its error file, else when the end was noticed."""


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """What happened from the start of the ranks to their end. Times are epoch seconds."""

    started: float
    ended: float
    launcher: str = ""
    first_progress: float | None = None
    """The first heartbeat; None if no rank wrote one."""
    exits: Mapping[int, ExitStatus] = field(default_factory=dict)
    """By rank, of each rank whose end was seen."""
    deaths: tuple[Death, ...] = ()
    """Ranks that failed by themselves, the first one first; those that only lost a peer last."""
    stall: Stall | None = None
    timed_out: bool = False
    interrupted: bool = False
    launch_error: str = ""
    """Why the ranks could not be started, or why the launcher died; other fields then hold what was
    seen before."""
    capture_seconds: float | None = None
    not_seen: tuple[str, ...] = ()
    pids: Mapping[int, int] = field(default_factory=dict)
    """By rank."""
    notes: tuple[str, ...] = ()
    """Remarks on how the launch ran."""
    oom_kills: int | None = None
    """Number of OOM kills on this machine during the launch; None if the kernel does not count
    them."""
    schema_version: int = SCHEMA_VERSION

    @property
    def succeeded(self) -> bool:
        """Whether every rank ended with exit code 0 by itself."""
        return (
            not (self.launch_error or self.timed_out or self.interrupted or self.stall)
            and bool(self.exits)
            and all(status.code == 0 for status in self.exits.values())
        )

    def since_stall(self) -> float | None:
        """Seconds from the last progress of a stalled run until now; None without a stall."""
        if self.stall is None:
            return None
        return round(time.time() - self.started - self.stall.at, 3)

    def write(self, folder: Path) -> Path:
        """Writes ``launch.json`` into ``folder`` atomically; returns its path."""
        return write_json(folder / LAUNCH_FILE, dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Path) -> LaunchRecord:
        """Reads ``launch.json`` or the folder that holds it; raises EvidenceError when it cannot
        be read or is of another schema version."""
        if path.is_dir():
            path = path / LAUNCH_FILE
        try:
            raw: dict[str, Any] = read_json(path)
        except (OSError, ValueError) as error:
            raise EvidenceError(f"{path}: {error}") from error
        if not isinstance(raw, dict) or raw.get("schema_version") != SCHEMA_VERSION:
            raise EvidenceError(f"{path}: not a launch record of schema version {SCHEMA_VERSION}")
        try:
            return _from_json(raw)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise EvidenceError(f"{path}: {error}") from error


def _from_json(raw: dict[str, Any]) -> LaunchRecord:
    known = {f.name for f in dataclasses.fields(LaunchRecord)}
    values = {name: value for name, value in raw.items() if name in known}
    values["exits"] = {int(r): ExitStatus(**s) for r, s in values.get("exits", {}).items()}
    values["pids"] = {int(r): int(pid) for r, pid in values.get("pids", {}).items()}
    values["deaths"] = tuple(Death(**d) for d in values.get("deaths", ()))
    stall = values.get("stall")
    if stall:
        values["stall"] = Stall(
            stall["at"], stall["window"], tuple(stall["waiting"]), tuple(stall["elsewhere"])
        )
    for name in ("not_seen", "notes"):
        values[name] = tuple(values.get(name, ()))
    return LaunchRecord(**values)
