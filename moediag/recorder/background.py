"""The recorder's own thread: it ends a rank whose launcher is gone, asks the device how far it is
once the rank has come to a stop, and dumps the Flight Recorder when asked. It must be invisible to
a watchdog that measures whether the rank computes: 5 wake-ups a second, about 20 microseconds
each."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from moediag.protocol import dump_request_file, flight_file, write_text
from moediag.recorder import flight, lifeline
from moediag.recorder.core import Recorder

_PERIOD = 0.2
_STOPPED = 3  # periods without an event after which the rank has come to a stop


class Watch:
    """A daemon thread; :meth:`stop` ends it."""

    def __init__(self, recorder: Recorder, folder: str) -> None:
        self._recorder = recorder
        self._request = Path(folder) / dump_request_file(recorder.rank)
        self._answer = Path(folder) / flight_file(recorder.rank)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moediag-recorder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        progress, quiet = -1, 0
        while not self._stop.wait(_PERIOD):
            if lifeline.parent_gone():
                os._exit(1)
            now = self._recorder.heartbeat.progress
            progress, quiet = now, quiet + 1 if now == progress else 0
            if quiet >= _STOPPED and quiet % _STOPPED == 0:
                self._recorder.stopped()
            try:
                # Removing the request is taking it: a second one asks for a second dump.
                self._request.unlink()
            except OSError:
                continue
            self._dump()

    def _dump(self) -> None:
        try:
            self._recorder.stopped()
            captures = self._recorder.captures
            if captures is not None and captures.running:
                # NCCL's Flight Recorder asks events when it is dumped.
                self._recorder.note_not_seen("Flight Recorder: a CUDA graph was being captured")
                return
            made = flight.dump()
            if made is None:
                self._recorder.note_not_seen("Flight Recorder: this torch keeps none")
                return
            if not made.recorded:
                self._recorder.note_not_seen(
                    "Flight Recorder: this torch kept no operation of this backend"
                )
            # The answer comes last: whoever asked may end this process once it is there.
            write_text(self._answer, made.text)
        except Exception as error:
            self._recorder.note_not_seen(f"Flight Recorder: {error!r}")
