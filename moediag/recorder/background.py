"""The recorder's thread. It ends the rank when its launcher is gone, polls the device once the rank
has stopped, and dumps the Flight Recorder on request. A watchdog that measures whether the rank
computes must not notice it: it wakes 5 times a second, for about 20 microseconds."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from moediag.protocol import dump_request_file, flight_file, write_text
from moediag.recorder import flight, lifeline
from moediag.recorder.core import Recorder

_PERIOD = 0.2
_STOPPED = 3  # periods without an event after which the rank counts as stopped


class Watch:
    """The daemon thread; :meth:`stop` ends it."""

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
                # Remove the request: a second request asks for a second dump.
                self._request.unlink()
            except OSError:
                continue
            self._dump()

    def _dump(self) -> None:
        try:
            self._recorder.captured()
            self._recorder.stopped()
            captures = self._recorder.captures
            if captures is not None and captures.running:
                # A dump of NCCL's Flight Recorder queries events.
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
            # Write the answer last: the requester may end this process once it exists.
            write_text(self._answer, made.text)
        except Exception as error:
            self._recorder.note_not_seen(f"Flight Recorder: {error!r}")
