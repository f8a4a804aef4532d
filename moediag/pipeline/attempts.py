"""The attempts of a watched job: which of them keep their folder, and one line for each other.

A job that its launcher restarts for days would fill the disk. The first attempts and the newest
ones are kept, and between them the first one of each failure, as far as there are few.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from moediag import protocol
from moediag.evidence.launch_record import LaunchRecord
from moediag.result import FAILURES, TrialResult, Verdict
from moediag.result.wording import plural

FIRST = 3
NEWEST = 10
FAILED = 10  # between these, the first attempts that failed in a way of their own
REMOVED_FILE = "attempts.jsonl"
_CAUSE = 300  # characters
_MOST = 10**9  # restarts: a larger number was not written here


class Attempts:
    """The results of the attempts in a run directory, without the removed ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: list[TrialResult] = []
        self._lines: dict[str, str] = {}  # by folder, until it is removed
        self._removed: Counter[str] = Counter()  # by verdict

    def add(self, number: int, found: TrialResult, record: LaunchRecord) -> None:
        """Adds the result of the attempt that has just ended; removes an older one if there are too
        many. Raises OSError if that cannot be noted."""
        self.results.append(found)
        self._lines[found.evidence] = json.dumps({
            "attempt": number, "started": round(record.started, 3),
            "ended": round(record.ended, 3), "verdict": found.verdict, "culprits": found.culprits,
            "cause": found.cause[:_CAUSE],
        })  # fmt: skip
        for old in self._too_many():
            self.results.remove(old)
            self._removed[old.verdict] += 1
            self._remove(old.evidence)

    @property
    def removed(self) -> str:
        """As :func:`removed`."""
        return _said(self._removed)

    def _too_many(self) -> list[TrialResult]:
        known = {_way(one) for one in self.results[:FIRST]}
        kept, removed = 0, []
        for one in self.results[FIRST:-NEWEST]:
            new = one.verdict in FAILURES and _way(one) not in known and kept < FAILED
            known.add(_way(one))
            kept += new
            removed += [] if new else [one]
        return removed

    def _remove(self, name: str) -> None:
        """Removes the folder of an attempt. The line comes first and trial.json goes first: who
        reads the run meanwhile finds either, also if this process is killed."""
        try:
            with (self.folder / REMOVED_FILE).open("a", encoding="utf-8") as file:
                file.write(self._lines.pop(name) + "\n")
        finally:
            with suppress(OSError):
                (self.folder / name / protocol.TRIAL_FILE).unlink()
            shutil.rmtree(self.folder / name, ignore_errors=True)


def _way(found: TrialResult) -> tuple[object, ...]:
    return found.verdict, found.culprits, found.signature


def removed(folder: Path) -> str:
    """Returns how many attempts of the job in ``folder`` were removed and how they ended, in words;
    "" if none was."""
    gone = (
        verdict
        for name, verdict in dict(_lines(folder)).items()
        if not (folder / name / protocol.TRIAL_FILE).exists()
    )
    return _said(Counter(gone))


def _said(ends: Counter[str]) -> str:
    if not ends:
        return ""
    how = ", ".join(f"{count:,} {verdict}" for verdict, count in ends.most_common())
    whole = plural(ends.total(), "attempt")
    return f"the evidence of {whole} was removed ({how}), {REMOVED_FILE} has a line for each"


def _lines(folder: Path) -> Iterator[tuple[str, str]]:
    """The name and the verdict of each attempt whose removal was begun."""
    text = b""
    with suppress(OSError):
        text = protocol.read_stored(folder / REMOVED_FILE)
    for line in text.splitlines():
        with suppress(ValueError, TypeError, KeyError):
            raw: Any = protocol.parse_json(line)
            number, verdict = raw["attempt"], Verdict(raw["verdict"])
            if type(number) is int and 0 <= number < _MOST:
                yield protocol.attempt_folder(number), verdict
