"""The lines of a bisect's state file: what they say, and whether they belong to this bisect.

The first line says what is searched (:class:`Header`), a ``learned`` line which failure, and each
``probe`` line is a finished probe. Probes are named by version, never by their place in a list that
grows with every release. An ``extra`` line is a probe of something else than a release that is
searched (a commit, a mixed environment), by its own name.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moediag.campaign.bisect.search.rates import Rate
from moediag.campaign.bisect.search.search import Probe, Search
from moediag.campaign.bisect.signature_match import Match, Target
from moediag.campaign.bisect.timeline import ProbeRecord
from moediag.errors import EvidenceError

SCHEMA_VERSION = 1


class Headless(EvidenceError):
    """A state file that ended before its first line was written: nothing is lost."""


@dataclass(frozen=True, slots=True)
class Header:
    """``scenario``: its name; ``digest``: of the scenario as it is run, overrides included;
    ``signature``: as the user gave it, "" where it is learned; ``releases``: versions that are
    searched, oldest first; ``options``: whatever else decides the answer (bad, good, window, held
    companions, …), plain JSON; ``command``: the command line as typed, from ``moediag`` on."""

    scenario: str
    digest: str
    package: str
    python: str
    platform: str
    match: Match
    releases: tuple[str, ...]
    signature: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    moediag_version: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """A state file's content. ``target``: None until the failure was learned."""

    header: Header
    target: Target | None = None
    probes: tuple[ProbeRecord, ...] = ()
    extras: tuple[ProbeRecord, ...] = ()

    def tell(self, search: Search) -> None:
        """Tells ``search`` every finished probe. Raises EvidenceError for a release that is not
        among those of the header."""
        places = {version: index for index, version in enumerate(self.header.releases)}
        for record in self.probes:
            if record.version not in places:
                raise EvidenceError(f"{record.version} is none of its releases")
            search.told(Probe(places[record.version], record.attempt), record.verdict)


def parse(path: Path, data: bytes) -> tuple[Stored, int]:
    """(content, how many bytes of it are whole). A last line that is cut off is no error, except
    for the first one (Headless). ``path`` is for messages. Raises EvidenceError."""
    stored: Stored | None = None
    records: dict[tuple[str, str, int], ProbeRecord] = {}
    start, number = 0, 0
    while start < len(data):
        end = data.find(b"\n", start)
        line = data[start:] if end < 0 else data[start:end]
        number += 1
        try:
            raw = json.loads(line)
            if not isinstance(raw, dict):
                raise ValueError("not a JSON object")
            stored = _taken(stored, records, raw)
        except (ValueError, KeyError, TypeError) as error:
            if end < 0:
                break  # the line that was being written when everything ended
            raise EvidenceError(
                f"{path}:{number}: {_problem(error)}",
                "Remove that line (its probe is made again), or start anew in another folder.",
            ) from error
        start = len(data) if end < 0 else end + 1
    if stored is None:
        raise Headless(
            f"{path}: it ended before its first line was written",
            "Nothing is lost: type the same command with --resume.",
        )
    probes = tuple(r for (kind, *_), r in records.items() if kind == "probe")
    extras = tuple(r for (kind, *_), r in records.items() if kind == "extra")
    return dataclasses.replace(stored, probes=probes, extras=extras), start


def _taken(
    stored: Stored | None, records: dict[tuple[str, str, int], ProbeRecord], raw: dict[str, Any]
) -> Stored:
    kind = raw.pop("e", None)
    if stored is None:
        if kind != "header":
            raise ValueError("the first line must be the header")
        version = raw.pop("schema_version", None)
        if version != SCHEMA_VERSION:
            raise ValueError(f"schema_version {version!r}, this moediag reads {SCHEMA_VERSION}")
        return Stored(_header(raw))
    if kind == "learned":
        if stored.target is not None:
            raise ValueError("a second line says which failure was learned")
        return dataclasses.replace(stored, target=_target(raw))
    if kind in ("probe", "extra"):
        record = ProbeRecord.from_json(raw)
        if kind == "probe" and record.version not in stored.header.releases:
            raise ValueError(f"{record.version} is none of the releases of this bisect")
        key = (kind, record.version, record.attempt)
        if key in records:
            raise ValueError(f"{record.version}, attempt {record.attempt}, is there twice")
        records[key] = record
    # Lines of a kind that a later moediag writes are none of ours.
    return stored


def _problem(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"field {error} is missing"
    return str(error)


# ------------------------------------------------------------------------ what is in them


def header_line(header: Header) -> dict[str, Any]:
    plain = dataclasses.asdict(header)
    return {"e": "header", "schema_version": SCHEMA_VERSION, **plain, "match": str(header.match)}


def _header(raw: dict[str, Any]) -> Header:
    known = {f.name for f in dataclasses.fields(Header)}
    values = {k: v for k, v in raw.items() if k in known}
    for name in ("releases", "command"):
        entries = values.get(name, [])
        if not isinstance(entries, list) or not all(isinstance(e, str) for e in entries):
            raise ValueError(f"{name} must be a list of texts")
        values[name] = tuple(entries)
    values["match"] = Match(values["match"])
    return Header(**values)


def learned_line(target: Target) -> dict[str, Any]:
    return {"e": "learned", **dataclasses.asdict(target), "match": str(target.match)}


def _target(raw: dict[str, Any]) -> Target:
    rate = Rate(**raw["rate"])
    return Target(
        str(raw["variant"]),
        tuple(map(str, raw["declared"])),
        tuple(map(str, raw["signatures"])),
        Match(raw["match"]),
        rate,
    )


def differences(stored: Stored, wanted: Header) -> Iterator[str]:
    """One text for each thing that makes the old probes answer another question."""
    there = stored.header
    for name, label in (
        ("scenario", "scenario"),
        ("package", "package"),
        ("python", "Python"),
        ("platform", "platform"),
        ("match", "--match"),
    ):
        old, new = getattr(there, name), getattr(wanted, name)
        if old != new:
            yield f"its {label} is {old}, not {new}"
    if there.scenario == wanted.scenario and there.digest != wanted.digest:
        yield f"the scenario {there.scenario} was another then (its file, --set or --stack)"
    if there.signature != wanted.signature and not _learned(stored, wanted.signature):
        learned = stored.target.signatures[0] if stored.target else ""
        old = there.signature or learned or "not learned yet"
        yield f"its signature is {old}, not {wanted.signature or 'one to be learned'}"
    for name in sorted({*there.options, *wanted.options}):
        old, new = there.options.get(name), wanted.options.get(name)
        if old != new:
            yield f"its {name} is {_word(old)}, not {_word(new)}"


def _learned(stored: Stored, signature: str) -> bool:
    """The signature that is asked for is the one that was learned."""
    return stored.target is not None and signature in stored.target.signatures


def _word(value: Any) -> str:
    return "not given" if value is None else str(value)
