"""What every callback does: records the laws of a training and reports at its end."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moediag import arguments, laws
from moediag.callbacks.sinks import Sink, check_sinks, send
from moediag.result import wording

PATIENCE = 10.0  # seconds that rank 0 waits for the ends of other ranks' records
_log = logging.getLogger("moediag")
_current: JobLaws | None = None  # whose record is being written; a process writes one at a time


class JobLaws:
    """:mod:`moediag.laws` from the first to the last step of each training. Sends nothing between
    ranks: rank 0 reads the records of the ranks that write into the same folder.

    ``folder``, ``every``: as of :func:`moediag.laws.record`. ``sinks``: where findings go besides
    the logger ``moediag``.
    """

    def __init__(self, folder: str = "laws-run", every: int = 0, sinks: Sequence[Sink] = ()):
        arguments.path("folder", folder)
        arguments.whole("every", every, 0)
        check_sinks(sinks)
        self.folder, self.every, self.sinks = folder, every, sinks
        self._trains = False
        self._prepared: weakref.ref[Any] | None = None  # the trainer, before it trains

    def begin(self, trainer: Any = None) -> None:
        """Begins to record; nothing in a job under ``moediag watch``. ``trainer``: what will train;
        it is only prepared, and another one that begins before it takes its place. Without one, the
        training begins.

        Never raises: if it cannot record, a warning says why the laws are not checked."""
        global _current
        trains = trainer is None
        self._prepared = None if trains else weakref.ref(trainer)
        if not trains and _current is not None and trainer is _current._of():
            return  # another callback of the same trainer: the warning comes when it trains
        if _current is not self:
            if _current is not None and _current._trains:
                self._not_checked(f"a training that still runs is recorded in {_current.folder}")
                return
            if _current is not None:
                laws.finish()
            try:
                begun = laws.record(self.folder, self.every)
            except (OSError, RuntimeError) as error:
                self._not_checked(str(error))
                return
            if not begun and laws.records():
                self._not_checked("the program itself records laws at the same time")
            _current = self if begun else None
        self._trains = trains

    def backward(self, model: Any) -> None:
        """A backward of ``model`` ended. Its parameters get their names from it where no module was
        seen running, because torch.compile'd code calls them."""
        from moediag.recorder import start

        recorder = start.installed if _current is self else None
        if recorder is not None and not recorder.roots:
            recorder.roots.append(("", weakref.ref(model)))
            recorder.note_not_seen("tokens per expert and modules inside torch.compile'd code")

    def end(self, error: BaseException | None = None) -> None:
        """Ends the record; rank 0 reports. ``error``: what ended this training."""
        global _current
        if _current is not self:
            return
        _current, self._trains = None, False
        rank, _ = laws.place()
        laws.finish(error)
        if rank == 0:
            try:
                self._report()
            except Exception:  # a training that went well must not fail because of its report
                _log.exception("the records in %s could not be diagnosed or sent", self.folder)

    def _of(self) -> Any:
        return self._prepared() if self._prepared is not None else None

    def _not_checked(self, why: str) -> None:
        _log.warning("the laws of this training are not checked: %s", why)

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
        trial = send(folder, ())
        found = trial.diagnosis
        doubtful = wording.UNCHECKED in found.cause or found.suspicious
        healthy = trial.verdict == "clean" and not doubtful
        level = logging.INFO if healthy else logging.WARNING
        _log.log(level, "%s: %s", found.verdict, found.cause)
        for text in found.suspicious:
            _log.warning("suspicious: %s", text)
        for note in found.notes:
            _log.warning("note: %s", note)
        _log.log(level, "the page: moediag diagnose %s", folder)
        if self.sinks:
            send(folder, self.sinks)
