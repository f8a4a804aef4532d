"""A cell of the table, and the table: what each release showed for each subject. Pure.

A *subject* is a scenario with one model family. Its cell on a release is *real* (a run of the
unfixed variant and its controls, like a bisect's probe) or *fast* (the one-process prediction). One
place can have both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, field
from typing import Any

from packaging.version import Version

from moediag.lab.campaign.bisect.probe_verdict import Kind
from moediag.lab.campaign.bisect.timeline import ProbeRecord
from moediag.protocol import Susceptibility
from moediag.records import dataclass
from moediag.result import Verdict, wording
from moediag.result.verdicts import StrEnum


class Mode(StrEnum):
    REAL = "real"
    FAST = "fast"


# Cell verdicts in addition to those of moediag.result.verdicts.Verdict.
COULD_NOT_RUN = "could-not-run"
FLAKY = "flaky"
SUSCEPTIBLE = "susceptible"
NOT_SUSCEPTIBLE = "not-susceptible"

Key = tuple[str, str, Mode]  # subject, version, mode


@dataclass(frozen=True, slots=True)
class Cell:
    """The result for one subject on one release."""

    subject: str
    version: str
    mode: Mode
    verdict: str  # of the unfixed variant, or one of the words above
    # whether the scenario's declared failure shows (False: clean beside a clean control; fast:
    # ranks agree), None if unknown
    shows: bool | None = None
    text: str = ""  # the signature of a failure, else the reason
    seconds: float | None = None
    evidence: str = ""  # its folder, relative to the matrix's
    digest: str = ""  # of the scenario as it ran

    @property
    def key(self) -> Key:
        return self.subject, self.version, self.mode

    @property
    def status(self) -> str | None:
        """Returns what is compared with a neighbour, or None if nothing was found out."""
        if self.shows is not None:
            return str(self.shows)
        undecided = (COULD_NOT_RUN, str(Verdict.INCONCLUSIVE), FLAKY)
        return None if self.verdict in undecided else self.verdict

    @property
    def mark(self) -> str:
        """Returns a short form; a fast one in brackets; "" if the release lacks the subject."""
        if self.verdict == Verdict.NOT_APPLICABLE:
            return ""
        short = {True: "x", False: "."}
        word = self.verdict if self.shows is None else short[self.shows]
        word = {COULD_NOT_RUN: "!", str(Verdict.INCONCLUSIVE): "~"}.get(word, word)
        return f"({word})" if self.mode == Mode.FAST else word

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "mode": str(self.mode)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Cell:
        """Raises ValueError or KeyError for what :meth:`to_json` does not write."""
        texts = {
            name: raw.get(name, "")
            for name in ("subject", "version", "verdict", "text", "evidence", "digest")
        }
        shows, seconds = raw.get("shows"), raw.get("seconds")
        if not all(isinstance(text, str) for text in texts.values()) or not texts["subject"]:
            raise ValueError("subject, version, verdict, text, evidence and digest are texts")
        if not isinstance(shows, bool | None) or not isinstance(seconds, int | float | None):
            raise ValueError("shows is true, false or null, seconds a number")
        Version(texts["version"])
        return cls(**texts, mode=Mode(raw["mode"]), shows=shows, seconds=seconds)


# ------------------------------------------------------------------------ where cells come from


def of_probe(
    subject: str, record: ProbeRecord, digest: str = "", pattern: str | None = None
) -> Cell:
    """Returns a real cell from the probe of a release. ``pattern``: a required part of the declared
    failure's signature; the same verdict without it is another failure."""
    verdict, shows = _judged(record)
    text = record.verdict.text or (record.signature if shows else "")
    if shows and pattern is not None and pattern not in text.split(":"):
        shows = None
    return Cell(
        subject, record.version, Mode.REAL, verdict, shows, text, record.seconds, record.evidence,
        digest,
    )  # fmt: skip


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


def of_susceptibility(
    subject: str, version: str, found: Susceptibility, seconds: float, evidence: str, digest: str
) -> Cell:
    """Returns a fast cell: ranks that leave other parameters without a gradient would disagree."""
    verdict, shows, text = _predicted(found)
    return Cell(subject, version, Mode.FAST, verdict, shows, text, seconds, evidence, digest)


def _predicted(found: Susceptibility) -> tuple[str, bool | None, str]:
    if found.applicable is not None:
        return str(Verdict.NOT_APPLICABLE), None, found.applicable
    for number, by_rank in enumerate(found.missing, 1):
        sets = [frozenset(missing) for missing in by_rank]
        everywhere = frozenset.intersection(*sets)
        if any(missing != everywhere for missing in sets):
            ranks = [
                f"rank {rank} {', '.join(wording.compact(n for n in by_rank[rank] if n in own))}"
                for rank, own in enumerate(missing - everywhere for missing in sets)
                if own
            ]
            return SUSCEPTIBLE, True, f"step {number}, without a gradient: {'; '.join(ranks)}"
    if not found.finite:
        return str(Verdict.NONFINITE), None, "a loss is not finite"
    return NOT_SUSCEPTIBLE, False, ""


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

    def at(self, subject: str, version: str) -> list[Cell]:
        """Returns the cells of a place, real before fast."""
        keys = ((subject, version, mode) for mode in (Mode.REAL, Mode.FAST))
        return [self.cells[key] for key in keys if key in self.cells]

    def mark(self, subject: str, version: str) -> str:
        """Returns ``x``, ``(.)``, ``x (x)``; ``?`` if nothing was run."""
        found = self.at(subject, version)
        if not found:
            return "?"
        marks = [cell.mark for cell in found if cell.mark]
        return " ".join(marks) + (" !=" if disagree(found) else "")

    @property
    def missing(self) -> int:
        """Returns the number of places without any cell."""
        return sum(not self.at(s, v) for s in self.subjects for v in self.versions)

    def disagreements(self) -> list[tuple[Cell, Cell]]:
        """Returns (real, fast) pairs that contradict each other."""
        places = (self.at(s, v) for s in self.subjects for v in self.versions)
        return [(found[0], found[1]) for found in places if disagree(found)]

    def unsettled(self) -> list[Cell]:
        """Returns cells without a result, and failures other than the declared one."""
        order = [c for s in self.subjects for v in self.versions for c in self.at(s, v)]
        return [c for c in order if c.shows is None and c.verdict != Verdict.NOT_APPLICABLE]

    def stretches(self, subject: str) -> list[tuple[str, str]]:
        """Returns (first, last) of each run of rows in which the failure shows, real before fast;
        rows without a result do not interrupt a run."""
        found: list[tuple[str, str]] = []
        inside = False
        for version in self.versions:
            told = [c for c in self.at(subject, version) if c.status is not None]
            if not told:
                continue
            if told[0].shows:
                found.append((found.pop()[0] if inside else version, version))
            inside = told[0].shows is True
        return found


def disagree(found: Sequence[Cell]) -> bool:
    """Whether both results exist and differ: shows, clean, not applicable, another failure."""
    if len(found) < 2 or any(cell.status is None for cell in found):
        return False
    return found[0].status != found[1].status


def ordered(versions: Iterable[str]) -> tuple[str, ...]:
    """Returns each version once, oldest first."""
    return tuple(sorted(set(versions), key=Version))
