"""The result of one night: a JSON file that is written once and never changed afterwards;
and the folder of nights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from moediag.errors import UsageError, says_disk_full
from moediag.protocol import build, read_json, write_json
from moediag.records import dataclass
from moediag.result.verdicts import StrEnum

SCHEMA_VERSION = 1


class State(StrEnum):
    GOOD = "good"
    BAD = "bad"
    UNKNOWN = "unknown"  # no result: not applicable, inconclusive, or its control failed


@dataclass(frozen=True, slots=True)
class Entry:
    """One variant of one scenario on one track."""

    scenario: str
    variant: str
    role: str
    track: str
    state: State
    verdict: str
    expected: str
    signature: str = ""
    why: str = ""  # the cause of a failure, or why the state is unknown
    # the versions that it ran on, package -> version
    stack: Mapping[str, str] = field(default_factory=dict)
    evidence: str = ""  # its run directory, relative to the folder of the night's artifacts
    command: str = ""  # repeats the run
    seconds: float = 0.0  # of all its trials

    @property
    def key(self) -> tuple[str, str, str]:
        return self.scenario, self.variant, self.track

    @property
    def outcome(self) -> str:
        """Returns what two runs of one stack must agree on."""
        return f"{self.state}:{self.verdict}"


@dataclass(frozen=True, slots=True)
class Job:
    """One scenario on one track."""

    scenario: str
    track: str
    finished: bool  # whether its entries exist
    seconds: float = 0.0  # duration, 0.0 if not started
    problem: str = ""  # why entries are missing, else ""


@dataclass(frozen=True, slots=True)
class Found:
    """A finding of a hunt that only one of two releases has."""

    signature: str
    families: tuple[str, ...]
    ways: tuple[str, ...] = ()
    registered: bool = False  # whether the register lists it
    text: str = ""  # what differs, in the family where it differs most


@dataclass(frozen=True, slots=True)
class Hunted:
    """The hunt of a night: one release of transformers against the one before."""

    release: str
    against: str = ""
    appeared: tuple[Found, ...] = ()
    gone: tuple[Found, ...] = ()
    same: int = 0  # ways that fail on both
    undecided: int = 0  # cells that could not be compared
    left: int = 0  # cells that the next night runs
    folder: str = ""
    problem: str = ""  # why there is no result, else ""
    added: tuple[str, ...] = ()  # families that the release before lacks


@dataclass(frozen=True, slots=True)
class Night:
    """One night."""

    started: str  # ISO 8601, UTC
    lane: str  # device and ranks, as in ``cpu-2``; nights of different lanes are not compared
    moediag_version: str
    machine: Mapping[str, Any]
    entries: tuple[Entry, ...] = ()
    jobs: tuple[Job, ...] = ()
    notes: tuple[str, ...] = ()  # tracks that are skipped tonight, and why
    seconds: float = 0.0
    complete: bool = False
    hunt: Hunted | None = None
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def from_json(raw: Any) -> Night:
    """Raises ValueError for anything that is not a night of this schema."""
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version {version!r}, this moediag reads {SCHEMA_VERSION}")
    night: Night = build(Night, raw)
    return night


class History:
    """Creates ``folder``. ``unreadable``: files that were ignored, each with the reason."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            paths = sorted(folder.glob("*.json"))
        except OSError as error:
            if says_disk_full(error):
                raise
            raise UsageError(
                f"--history {folder}: {error.strerror or error}",
                "Give a folder that can be made; the nights before are kept there.",
            ) from error
        self.nights: list[Night] = []
        self.unreadable: list[str] = []
        for path in paths:
            try:
                self.nights.append(from_json(read_json(path)))
            except (OSError, ValueError) as error:
                self.unreadable.append(f"{path.name}: {error}")

    def begin(self, started: str, lane: str) -> Path:
        """Creates the new night's file, empty until the first :meth:`keep`, to reserve it."""
        stamp = started.replace("-", "").replace(":", "").split("+")[0]
        number = 1
        while True:
            path = self.folder / f"{stamp}-{lane}{'' if number == 1 else f'-{number}'}.json"
            try:
                with path.open("x", encoding="utf-8") as new:
                    # Treated as complete: a killed night must not look like a broken file.
                    json.dump(Night(started, lane, "", {}).to_json(), new)
            except FileExistsError:
                number += 1
            else:
                return path

    @staticmethod
    def keep(path: Path, night: Night) -> None:
        write_json(path, night.to_json())
