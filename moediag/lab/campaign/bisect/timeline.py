"""A finished probe, as a line of the display, and all probed releases on one line. Pure.

``4.52 G  4.53 B … 4.57 B │ 5.0 G``: the letters are the verdicts (Good, Bad, Other failure,
Skipped, Flaky), the bar marks a new major version, the dots replace releases with the same verdict.
A minor version represents its releases if all probed ones agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from packaging.version import Version

from moediag.lab.campaign.bisect.probe_verdict import ProbeVerdict, describe
from moediag.lab.campaign.bisect.signature_match import Target
from moediag.lab.campaign.engine import Line
from moediag.records import dataclass
from moediag.result import wording

_SHOWN = 3  # up to this many equal neighbours are all shown


def probe_name(version: str, attempt: int) -> str:
    """Returns the name of a probe in the journal and in messages."""
    return version if attempt == 1 else f"{version} (probe {attempt})"


@dataclass(frozen=True, slots=True)
class ProbeRecord:
    """A finished probe."""

    version: str
    verdict: ProbeVerdict
    attempt: int = 1
    uploaded: str = ""  # date of the release, ISO 8601 or ""
    signature: str = ""  # what its unfixed trial showed
    seconds: float | None = None  # wall clock, environment included
    evidence: str = ""  # its run directory, relative to the bisect's
    # False: its launch failed, which says nothing about the release. A resumed bisect repeats it.
    lasting: bool = True

    def __post_init__(self) -> None:
        if self.attempt < 1:
            raise ValueError(f"attempt {self.attempt!r}: a number from 1")

    @property
    def name(self) -> str:
        return probe_name(self.version, self.attempt)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "attempt": self.attempt,
            "verdict": self.verdict.to_json(),
            "uploaded": self.uploaded,
            "signature": self.signature,
            "seconds": None if self.seconds is None else round(self.seconds, 3),
            "evidence": self.evidence,
        }


# ------------------------------------------------------------------------ one line


def timeline(releases: Sequence[str], verdicts: Mapping[int, ProbeVerdict]) -> str:
    """Returns the line, "" without probes. ``releases``: oldest first; ``verdicts``: by index."""
    entries = _entries(releases, verdicts)
    line, previous = "", None
    for start, end in _runs(entries):
        run = entries[start:end]
        hidden = len(run) > _SHOWN and _major(run[0]) == _major(run[-1])
        for number, entry in enumerate([run[0], run[-1]] if hidden else run):
            if previous is not None:
                turn = _major(previous) != _major(entry)
                line += " │ " if turn else " … " if hidden and number else "  "
            line += f"{entry[0]} {entry[1]}"
            previous = entry
    return line


_Entry = tuple[str, str]  # label, letter


def _entries(releases: Sequence[str], verdicts: Mapping[int, ProbeVerdict]) -> list[_Entry]:
    minors: dict[tuple[int, int, int], list[int]] = {}
    for index in sorted(verdicts):
        minors.setdefault(_minor(releases[index]), []).append(index)
    found: list[_Entry] = []
    for minor, members in minors.items():
        letters = {verdicts[i].kind.letter for i in members}
        if len(letters) == 1:
            label = f"{minor[0]}!" * bool(minor[0]) + f"{minor[1]}.{minor[2]}"
            found.append((label, letters.pop()))
        else:
            found += [(releases[i], verdicts[i].kind.letter) for i in members]
    return found


def _minor(version: str) -> tuple[int, int, int]:
    parsed = Version(version)
    return parsed.epoch, parsed.major, parsed.minor


def _major(entry: _Entry) -> tuple[int, int]:
    return _minor(entry[0])[:2]


def _runs(entries: Sequence[_Entry]) -> list[tuple[int, int]]:
    """Returns [start, end) of neighbours with the same letter and major version."""
    starts = [
        i
        for i, entry in enumerate(entries)
        if not i or entry[1] != entries[i - 1][1] or _major(entry) != _major(entries[i - 1])
    ]
    return list(itertools.pairwise([*starts, len(entries)]))


def target_lines(target: Target) -> list[str]:
    """Returns the target failure and how often it shows."""
    text = [f"looking for ({target.match}): {signature}" for signature in target.signatures]
    rate = target.rate
    if not rate.steady:
        repeats = wording.plural(rate.repeats(), "clean trial")
        text.append(
            f"it showed in {rate.shown} of {wording.plural(rate.trials, 'trial')}, so {repeats} "
            "make a release good"
        )
    return text


def probe_line(record: ProbeRecord, wanted: Sequence[str] = ()) -> Line:
    """Returns ``4.53.0  12.1 s  bad``, followed by what showed unless it is among ``wanted``."""
    spent = "" if record.seconds is None else f"  {wording.seconds(record.seconds)}"
    verdict = record.verdict
    what = str(verdict.kind) if verdict.text in wanted else describe(verdict)
    return Line(f"{record.name}{spent}  {what}", seconds=record.seconds)
