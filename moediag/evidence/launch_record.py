"""The record of one launch, written as ``launch.json``."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from moediag.evidence.model import ExitStatus, Stall
from moediag.protocol import LAUNCH_FILE, build, read_json, write_json
from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class Death:
    """A rank that failed by itself."""

    rank: int
    time: float = 0.0
    """Epoch seconds: the exact time in its error file, else when the end was noticed."""


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """What happened from the start of the ranks to their end. Times are epoch seconds."""

    started: float = 0.0
    ended: float = 0.0
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
    schema_version: int = 1

    @property
    def succeeded(self) -> bool:
        """Whether every rank ended with exit code 0 by itself."""
        return (
            not (self.launch_error or self.timed_out or self.interrupted or self.stall)
            and bool(self.exits)
            and all(status.code == 0 for status in self.exits.values())
        )

    @property
    def until_progress(self) -> float | None:
        """Seconds from the start to the first heartbeat."""
        first = self.first_progress
        return None if first is None else round(first - self.started, 3)

    def since_stall(self) -> float | None:
        """Seconds from the last progress of a stalled run until now; None without a stall."""
        if self.stall is None:
            return None
        return round(time.time() - self.started - self.stall.at, 3)

    def write(self, folder: Path) -> Path:
        """Writes ``launch.json`` into ``folder`` atomically; returns its path."""
        return write_json(folder / LAUNCH_FILE, dataclasses.asdict(self))


def read_launch(path: Path) -> LaunchRecord:
    """The record, as far as it can be read; ``not_seen`` also says what cannot."""
    try:
        raw = read_json(path, "replace")
    except FileNotFoundError:
        return LaunchRecord(not_seen=("exit codes and signals (no launch.json)",))
    except (OSError, ValueError):
        raw = None
    if not isinstance(raw, dict):
        return LaunchRecord(not_seen=("exit codes and signals (launch.json is unreadable)",))
    raw["not_seen"], lost = [str(one) for one in _listed(raw.get("not_seen"))], []
    raw["deaths"] = [one for one in _listed(raw.get("deaths")) if _built(Death, one) is not None]
    raw["deaths"].sort(key=lambda death: float(death.get("time") or 0.0))
    exits = raw.get("exits")
    raw["exits"] = {}
    for rank, status in exits.items() if isinstance(exits, dict) else ():
        if rank.isdecimal() and _built(ExitStatus, status) is not None:
            raw["exits"][rank] = status
        else:
            lost.append(f"rank {rank}: how it ended (launch.json)")
    values: dict[str, Any] = {}
    for name in raw.keys() & {f.name for f in dataclasses.fields(LaunchRecord)}:
        alone = _built(LaunchRecord, {name: raw[name]})
        if alone is not None:
            values[name] = getattr(alone, name)
        elif name == "stall":
            lost.append("what the watchdog saw (launch.json)")
    return LaunchRecord(**{**values, "not_seen": (*values["not_seen"], *lost)})


def _built(kind: type[Any], raw: Any) -> Any:
    """What ``raw`` describes; None if it describes no ``kind``."""
    try:
        return build(kind, raw)
    except (ValueError, OverflowError):
        return None


def _listed(raw: Any) -> list[Any]:
    return raw if isinstance(raw, list) else []
