"""A cell of the table, and the table: what each release showed for each subject. Pure.

A *subject* is a scenario with one model family. Its cell on a release is a run of the unfixed
variant and its controls, like a bisect's probe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field

from packaging.version import Version

from moediag.lab.campaign.bisect.probe_verdict import Kind
from moediag.lab.campaign.bisect.timeline import ProbeRecord
from moediag.records import dataclass
from moediag.result import Verdict

# Cell verdicts in addition to those of moediag.result.verdicts.Verdict.
COULD_NOT_RUN = "could-not-run"
FLAKY = "flaky"

Key = tuple[str, str]  # subject, version


@dataclass(frozen=True, slots=True)
class Cell:
    """The result for one subject on one release."""

    subject: str
    version: str
    verdict: str  # of the unfixed variant, or one of the words above
    # whether the scenario's declared failure shows (False: clean beside a clean control), None if
    # unknown
    shows: bool | None = None
    text: str = ""  # the signature of a failure, else the reason
    seconds: float | None = None
    evidence: str = ""  # its folder, relative to the matrix's
    digest: str = ""  # of the scenario as it ran

    @property
    def key(self) -> Key:
        return self.subject, self.version

    @property
    def status(self) -> str | None:
        """Returns what is compared with a neighbour, or None if nothing was found out."""
        if self.shows is not None:
            return str(self.shows)
        undecided = (COULD_NOT_RUN, str(Verdict.INCONCLUSIVE), FLAKY)
        return None if self.verdict in undecided else self.verdict

    @property
    def mark(self) -> str:
        """Returns a short form; "" if the release lacks the subject."""
        if self.verdict == Verdict.NOT_APPLICABLE:
            return ""
        short = {True: "x", False: "."}
        word = self.verdict if self.shows is None else short[self.shows]
        return {COULD_NOT_RUN: "!", str(Verdict.INCONCLUSIVE): "~"}.get(word, word)

    def __post_init__(self) -> None:
        Version(self.version)  # raises ValueError


# ------------------------------------------------------------------------ where cells come from


def of_probe(
    subject: str, record: ProbeRecord, digest: str = "", pattern: str | None = None
) -> Cell:
    """Returns a cell from the probe of a release. ``pattern``: a required part of the declared
    failure's signature; the same verdict without it is another failure."""
    verdict, shows = _judged(record)
    text = record.verdict.text or (record.signature if shows else "")
    if shows and pattern is not None and pattern not in text.split(":"):
        shows = None
    return Cell(
        subject, record.version, verdict, shows, text, record.seconds, record.evidence, digest
    )


def _judged(record: ProbeRecord) -> tuple[str, bool | None]:
    kind, shown = record.verdict.kind, record.signature.split("; ")[0].split(":")[0]
    if kind == Kind.BAD:
        return record.verdict.text.split(":")[0] or shown, True
    if kind == Kind.GOOD:
        return str(Verdict.CLEAN), False
    if kind == Kind.OTHER:
        return record.verdict.text.split(":")[0], None
    if kind == Kind.FLAKY:
        return FLAKY, None
    if shown == Verdict.NOT_APPLICABLE:
        return shown, None
    # Ranks ran, or nothing did: a failed import says no more than a missing environment.
    ran = bool(shown) and not (
        shown == Verdict.CRASH and "cannot be imported" in record.verdict.text
    )
    return (str(Verdict.INCONCLUSIVE) if ran else COULD_NOT_RUN), None


# ------------------------------------------------------------------------ the table


@dataclass(frozen=True, slots=True)
class Matrix:
    """The table."""

    package: str
    subjects: tuple[str, ...]  # its columns, in order
    versions: tuple[str, ...]  # its rows, in order
    cells: Mapping[Key, Cell]  # by key
    # by subject, the verdicts that its scenario declares
    looked_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    listed: tuple[str, ...] = ()  # every available release, oldest first

    def mark(self, subject: str, version: str) -> str:
        """Returns ``x``; ``?`` if nothing was run."""
        found = self.cells.get((subject, version))
        return "?" if found is None else found.mark

    @property
    def missing(self) -> int:
        """Returns the number of places without any cell."""
        return sum((s, v) not in self.cells for s in self.subjects for v in self.versions)

    def unsettled(self) -> list[Cell]:
        """Returns cells without a result, and failures other than the declared one."""
        places = ((s, v) for s in self.subjects for v in self.versions)
        order = [self.cells[key] for key in places if key in self.cells]
        return [c for c in order if c.shows is None and c.verdict != Verdict.NOT_APPLICABLE]

    def stretches(self, subject: str) -> list[tuple[str, str]]:
        """Returns (first, last) of each run of rows in which the failure shows; rows without a
        result do not interrupt a run."""
        found: list[tuple[str, str]] = []
        inside = False
        for version in self.versions:
            told = self.cells.get((subject, version))
            if told is None or told.status is None:
                continue
            if told.shows:
                found.append((found.pop()[0] if inside else version, version))
            inside = told.shows is True
        return found


def ordered(versions: Iterable[str]) -> tuple[str, ...]:
    """Returns each version once, oldest first."""
    return tuple(sorted(set(versions), key=Version))
