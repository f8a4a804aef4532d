"""What a bisect has found so far, in its journal.

The ``learned`` line holds the target failure. Each ``probe`` line is a finished probe of a release,
each ``extra`` line one of something else (a commit, a mixed environment). Probes are named by
version, not by position in a list that grows with every release.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from moediag.errors import EvidenceError
from moediag.lab.campaign.bisect.probe_verdict import ProbeVerdict
from moediag.lab.campaign.bisect.search.rates import Rate
from moediag.lab.campaign.bisect.search.search import Probe, Search
from moediag.lab.campaign.bisect.signature_match import Match, Target
from moediag.lab.campaign.bisect.timeline import ProbeRecord, probe_name
from moediag.lab.campaign.engine import Header, Journal, Records
from moediag.lab.campaign.engine import journal as journals
from moediag.protocol import build

_TARGET = "target"


class State:
    """Reads and writes the journal of a bisect; a context manager.

    Adding raises ValueError for an existing record, and as :meth:`Journal.append`."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.folder = journal.folder
        releases = journal.header.kept.get("releases")
        if not isinstance(releases, list):
            raise EvidenceError(f"{journal.path}:1: the header is incomplete: no releases")
        self.releases = tuple(map(str, releases))
        self._target = Records(journal, "learned", _target, _target_line)
        self.records = Records(journal, "probe", self._release, ProbeRecord.to_json)
        self.passing: list[ProbeRecord] = []
        """Probes of this command that a resumed one repeats; not in the journal."""
        self._extras = Records.of(journal, "extra", ProbeRecord, ProbeRecord.to_json)

    def __enter__(self) -> State:
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.close()

    @property
    def target(self) -> Target | None:
        """Returns the target failure, or None before it was learned."""
        return self._target.get(_TARGET)

    @property
    def probes(self) -> tuple[ProbeRecord, ...]:
        return (*self.records.values(), *self.passing)

    @property
    def extras(self) -> tuple[ProbeRecord, ...]:
        return tuple(self._extras.values())

    def probe(self, version: str) -> ProbeVerdict | None:
        """Returns the verdict of the first probe of ``version`` in the journal."""
        found = self.records.get(probe_name(version, 1))
        return found.verdict if found is not None else None

    def learned(self, target: Target) -> None:
        self._target.add(_TARGET, target)

    def finished(self, record: ProbeRecord) -> None:
        self.records.add(record.name, record)

    def finished_extra(self, record: ProbeRecord) -> None:
        """Records a probe of something else than a searched release."""
        if record.lasting:
            self._extras.add(record.name, record)

    def known(self, name: str) -> ProbeRecord | None:
        """Returns such a probe if it is finished."""
        return self._extras.get(name)

    def done(self) -> str:
        count = len(self.probes) + len(self._extras)
        return f"{count} finished probe{'' if count == 1 else 's'}"

    def tell(self, search: Search) -> None:
        """Passes every finished probe of a release to ``search``."""
        places = {version: index for index, version in enumerate(self.releases)}
        for record in self.probes:
            search.told(Probe(places[record.version], record.attempt), record.verdict)

    def _release(self, raw: dict[str, Any]) -> ProbeRecord:
        record: ProbeRecord = build(ProbeRecord, raw)
        if record.version not in self.releases:
            raise ValueError(f"{record.version} is none of the releases of this bisect")
        return record


def create(folder: Path, header: Header) -> State:
    """Creates the state, as :func:`journals.create`."""
    return _opened(journals.create(folder, header))


def resume(folder: Path, header: Header) -> State:
    """Resumes the state, as :func:`journals.resume`."""
    return _opened(journals.resume(folder, header))


def opened(header: Header, out: Path | None, resumed: bool, name: str) -> State:
    """Creates or resumes the state, as :func:`journals.opened`."""
    return _opened(journals.opened(header, out, resumed, name))


def read(folder: Path) -> State:
    """Reads the state in ``folder`` without changing it. Raises EvidenceError."""
    header, lines = journals.lines_of(folder)
    if header.campaign != "bisect":
        raise EvidenceError(f"{folder}: it is a {header.campaign}, not a bisect")
    return State(Journal(folder / journals.JOURNAL_FILE, -1, header, lines))


def _opened(journal: Journal) -> State:
    try:
        return State(journal)
    except BaseException:
        journal.close()
        raise


def _target(raw: dict[str, Any]) -> Target:
    declared, signatures = (tuple(map(str, raw[name])) for name in ("declared", "signatures"))
    rate = Rate(**raw["rate"])
    return Target(str(raw["variant"]), declared, signatures, Match(raw["match"]), rate)


def _target_line(target: Target) -> dict[str, Any]:
    return {**dataclasses.asdict(target), "match": str(target.match)}
