"""What one night leaves: a JSON file that is written once and never changed afterwards. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moediag.result.verdicts import StrEnum

SCHEMA_VERSION = 1


class State(StrEnum):
    GOOD = "good"
    BAD = "bad"
    UNKNOWN = "unknown"  # it says nothing: not applicable, inconclusive, or its control failed


@dataclass(frozen=True, slots=True)
class Entry:
    """One variant of one scenario on one track. ``stack``: the versions that it ran on, package ->
    version; ``why``: the cause of a failure, or why the state is not known; ``evidence``: its run
    directory, relative to the folder of the night's artifacts; ``command``: what runs it again."""

    scenario: str
    variant: str
    role: str
    track: str
    state: str
    verdict: str
    expected: str
    signature: str = ""
    why: str = ""
    stack: Mapping[str, str] = field(default_factory=dict)
    evidence: str = ""
    command: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.scenario, self.variant, self.track

    @property
    def outcome(self) -> str:
        """What two runs of one stack must agree on."""
        return f"{self.state}:{self.verdict}"


@dataclass(frozen=True, slots=True)
class Job:
    """One scenario on one track. ``seconds``: that it took, 0.0 where it was not begun;
    ``finished``: whether its entries are there; ``problem``: why they are not, or not all."""

    scenario: str
    track: str
    finished: bool
    seconds: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Night:
    """``lane``: device and ranks, as in ``cpu-2``; nights of different lanes are not compared.
    ``notes``: tracks that are skipped tonight, and why."""

    started: str  # ISO 8601, UTC
    lane: str
    moediag_version: str
    machine: Mapping[str, Any]
    entries: tuple[Entry, ...] = ()
    jobs: tuple[Job, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    complete: bool = False
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def from_json(raw: Any) -> Night:
    """Raises ValueError for anything that is no night of this schema."""
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version {version!r}, this moediag reads {SCHEMA_VERSION}")
    try:
        values = dict(raw)
        values["entries"] = tuple(known(Entry, e) for e in raw["entries"])
        values["jobs"] = tuple(known(Job, j) for j in raw["jobs"])
        values["notes"] = tuple(raw["notes"])
        night: Night = known(Night, values)
        return night
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"fields are missing or wrong: {error}") from error


def known(kind: Any, raw: Mapping[str, Any]) -> Any:
    """Readers ignore fields that they do not know."""
    names = {f.name for f in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in raw.items() if name in names})
