"""What every callback does: records the laws of a job, and reports what they found at its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from moediag import laws
from moediag.callbacks.sinks import Sink, send

PATIENCE = 10.0  # seconds that rank 0 waits for the ends of other ranks' records
_log = logging.getLogger("moediag")


class JobLaws:
    """:mod:`moediag.laws` from the first to the last step of one training. Sends nothing between
    ranks: rank 0 reads the records of the ranks that write into the same folder.

    ``folder``, ``every``: as of :func:`moediag.laws.record`. ``sinks``: where findings go besides
    the logger ``moediag``.
    """

    def __init__(self, folder: str = "laws-run", every: int = 0, sinks: Sequence[Sink] = ()):
        self.folder, self.every, self.sinks = folder, every, sinks
        self._begun = self._ended = False

    def begin(self) -> None:
        """Begins to record, once; nothing in a job under ``moediag watch``."""
        if not self._begun:
            self._begun = laws.record(self.folder, self.every)

    def end(self, error: BaseException | None = None) -> None:
        """Ends the record; rank 0 reports. ``error``: what ended this rank."""
        if not self._begun or self._ended:
            return
        self._ended = True
        rank, _ = laws.place()
        laws.finish(error)
        if rank == 0:
            try:
                self._report()
            except Exception:  # a training that went well must not fail because of its report
                _log.exception("the records in %s could not be diagnosed", self.folder)

    def _report(self) -> None:
        from moediag.evidence.trial_folder import read_trial
        from moediag.protocol import events_file

        folder = Path(self.folder)
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            ranks = read_trial(folder).ranks.values()
            here = [seen for seen in ranks if (folder / events_file(seen.rank)).exists()]
            if all(seen.finished or seen.error is not None for seen in here):
                break
            time.sleep(PATIENCE / 20)
        trial = send(folder, self.sinks)
        found = trial.diagnosis
        level = logging.INFO if trial.verdict == "clean" else logging.WARNING
        _log.log(level, "%s: %s", found.verdict, found.cause)
        for note in found.notes:
            _log.warning("note: %s", note)
        _log.log(level, "the page: moediag diagnose %s", folder)
