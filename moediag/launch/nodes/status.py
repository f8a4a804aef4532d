"""The message (pulse) that a supervisor sends to other nodes about once a second, as JSON."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from moediag.launch.rank_sample import RankSample
from moediag.records import dataclass

SCHEMA_VERSION = 1
KEY = re.compile(r"[0-9a-f]{8,64}")  # of a node, and of a job
_MOST = 65_536  # maximum number of ranks per node
_MOST_RANKS = 1 << 20
_SAMPLE = (
    ("alive", bool), ("state", str), ("progress", int), ("step", int), ("begun", bool),
    ("cpu", float), ("runnable", bool), ("stopped", bool), ("at", float), ("work", str),
    ("on_device", bool), ("blocked", bool), ("looked", bool),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ObservedStall:
    """A stall as observed by the node that found it."""

    progress: Mapping[int, int]
    """The progress of each rank."""
    waiting: tuple[int, ...]
    elsewhere: tuple[int, ...]
    early: bool
    """As in :class:`moediag.evidence.model.Stall`."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """The message of one node to the others."""

    key: str
    """Identifies the node's supervisor."""
    host: str
    number: int | None = None
    """The number of the node, if nodes have numbers."""
    seq: int = 0
    """Grows with each pulse."""
    look: int = 0
    """Grows with each sampling of the ranks."""
    period: float = 0.5
    """Seconds between two pulses."""
    samples: tuple[RankSample, ...] = ()
    heard: Mapping[str, int] = field(default_factory=dict)
    """By key: the last ``seq`` received from that node before the sampling."""
    has: Mapping[str, int] = field(default_factory=dict)
    """By key: the number of the evidence fetched from that node."""
    deaths: tuple[int, ...] = ()
    """Ranks that failed by themselves."""
    stood: ObservedStall | None = None
    published: int = 0
    """The number of the evidence that can be fetched, from 1; 0: none."""
    over: bool = False
    """This is the last pulse: the ranks ended or are no longer watched."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(s.rank for s in self.samples))

    @property
    def name(self) -> str:
        """``node 1``, else its host."""
        return name_of(self.number, self.host)

    def to_json(self) -> dict[str, Any]:
        raw = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        raw["samples"] = {
            str(s.rank): {name: getattr(s, name) for name, _ in _SAMPLE} for s in self.samples
        }
        raw["stood"] = dataclasses.asdict(self.stood) if self.stood is not None else None
        return {"schema_version": SCHEMA_VERSION, **raw}


def name_of(number: int | None, host: str) -> str:
    """The node's name for people."""
    return f"host {host}" if number is None else f"node {number}"


def of_json(raw: Any) -> Pulse:
    """Returns the pulse in parsed JSON. Raises ValueError for anything else: other programs may
    write into the folder."""
    if not isinstance(raw, dict) or raw.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"no pulse of schema version {SCHEMA_VERSION}")
    try:
        number = raw["number"]
        if len(raw["samples"]) > _MOST:
            raise ValueError("too many ranks")
        found = Pulse(
            key=str(raw["key"]),
            host=str(raw["host"])[:255],
            number=None if number is None else int(number),
            seq=int(raw["seq"]),
            look=int(raw["look"]),
            period=min(max(float(raw["period"]), 0.0), 60.0),
            samples=tuple(_sample(int(rank), one) for rank, one in raw["samples"].items()),
            heard={str(key): int(seq) for key, seq in raw["heard"].items()},
            has={str(key): int(number) for key, number in raw["has"].items()},
            deaths=_ranks(raw["deaths"]),
            stood=None if raw["stood"] is None else _stood(raw["stood"]),
            published=int(raw["published"]),
            over=bool(raw["over"]),
        )
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"no pulse: {error!r}") from error
    if not KEY.fullmatch(found.key):
        raise ValueError(f"no key of a node: {found.key[:80]!r}")
    return found


def _sample(rank: int, raw: Mapping[str, Any]) -> RankSample:
    if not 0 <= rank < _MOST_RANKS:
        raise ValueError(f"no rank: {rank}")
    return RankSample(rank, **{name: kind(raw[name]) for name, kind in _SAMPLE})  # type: ignore[arg-type]


def _stood(raw: Mapping[str, Any]) -> ObservedStall:
    progress = {int(rank): int(number) for rank, number in raw["progress"].items()}
    sides = _ranks(raw["waiting"]), _ranks(raw["elsewhere"])
    return ObservedStall(progress, *sides, bool(raw["early"]))


def _ranks(raw: Any) -> tuple[int, ...]:
    return tuple(int(rank) for rank in raw)
