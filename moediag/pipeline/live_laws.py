"""Reports the first broken law while the job still runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from moediag.diagnosis import broken_law
from moediag.evidence.law_records import read_laws
from moediag.evidence.model import Evidence, RankEvidence
from moediag.protocol import laws_file, natural

_PERIOD = 5.0  # seconds between two looks
_SHARE = 50.0  # a look that takes long is repeated after so many times its duration


class LiveLaws:
    """Reads the ranks' logs of laws again when all have grown."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._told = False
        self._next = 0.0  # time.monotonic() of the next look
        self._sizes: dict[Path, int] = {}

    def look(self, folder: Path) -> None:
        """Reads the logs in the folder of an attempt, unless it did a moment ago."""
        began = time.monotonic()
        if self._told or began < self._next:
            return
        sizes = {
            path: path.stat().st_size
            for path in folder.glob(laws_file(0).replace("0", "*"))
            if _rank(path) is not None
        }
        self._next = began + _PERIOD
        if not sizes or any(self._sizes.get(path) == size for path, size in sizes.items()):
            return
        self._sizes = sizes
        found = {rank for path in sizes if (rank := _rank(path)) is not None}
        ranks = {rank: RankEvidence(rank, laws=read_laws(folder, rank)[0]) for rank in found}
        text = broken_law(Evidence(max(found) + 1, ranks, watched=True))
        if text:
            self._told = True
            self._tell(text)
        self._next = time.monotonic() + max(_PERIOD, _SHARE * (time.monotonic() - began))


def _rank(path: Path) -> int | None:
    return natural(path.name.split(".")[0].removeprefix("rank-"))
