"""The rank's log: one JSON object per line, one ``write`` per line, bounded in bytes.

Each line goes to the kernel in a single ``os.write`` on an ``O_APPEND`` descriptor before the event
that it describes, so SIGKILL and SIGABRT lose no recorded event. The log is a ring of two segments.
A full segment replaces the older one, and the new segment starts with the *preamble*, the lines
that later lines refer to.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from typing import Any, Dict, List, Tuple

# Bytes of one segment; the rank's log stays below twice this.
SEGMENT_BYTES = 128 * 1024 * 1024
# Limits on interned lists of parameter names and on the preamble. Beyond them events carry null, so
# that a job whose sets never repeat does not fill memory.
MAX_NAMES = 4096
MAX_PREAMBLE_BYTES = 16 * 1024 * 1024


def now() -> str:
    """The wall clock as JSON, in microseconds. Formatting a float costs more than the rest of a
    line."""
    nanoseconds = str(time.time_ns())
    return f"{nanoseconds[:-9]}.{nanoseconds[-9:-3]}"


class EventLog:
    """Appends events to ``path``; never raises. A full segment is moved to ``older``."""

    def __init__(self, path: str, older: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.path = path
        self.older = older
        self.segment_bytes = segment_bytes
        self.lost = 0  # events that could not be written
        self._why_lost = ""
        self._torn = False  # the last write stopped in the middle of a line
        self._preamble: List[bytes] = []
        self._preamble_bytes = 0
        self._names: Dict[Tuple[str, ...], int] = {}
        # Re-entrant: a Python signal handler may issue a collective during a write.
        self.lock = threading.RLock()
        self._fd = self._open()
        self._size = os.fstat(self._fd).st_size

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        return os.open(self.path, flags, 0o644)

    def line(self, text: str, keep: bool = False) -> bool:
        """Writes one line (``text`` has no newline); False if it was lost. ``keep`` repeats it at
        the start of the next segment."""
        data = f"{text}\n".encode("utf-8", "backslashreplace")
        with self.lock:
            if keep and self._preamble_bytes < MAX_PREAMBLE_BYTES:
                self._preamble.append(data)
                self._preamble_bytes += len(data)
            if self._size + len(data) > self.segment_bytes and self._size:
                self._rotate()
            return self._write(data)

    def event(self, kind: str, keep: bool = False, **fields: Any) -> bool:
        """Writes one event of ``kind`` with the wall-clock time."""
        text = json.dumps(fields, separators=(",", ":"), default=str)
        more = f",{text[1:]}" if fields else "}"
        return self.line(f'{{"e":"{kind}","t":{now()}{more}', keep)

    def names(self, fqns: Tuple[str, ...]) -> str:
        """Returns the JSON id of an interned list of names (``null`` when the table is full);
        writes the ``names`` event at first use."""
        known = self._names.get(fqns)
        if known is None:
            with self.lock:
                full = len(self._names) >= MAX_NAMES or self._preamble_bytes >= MAX_PREAMBLE_BYTES
                if full:
                    return "null"
                known = self._names[fqns] = len(self._names)
                self.event("names", keep=True, id=known, fqns=list(fqns))
        return str(known)

    def _write(self, data: bytes) -> bool:
        try:
            if self._torn:
                data = b"\n" + data
            written = os.write(self._fd, data)
        except OSError as error:
            self.lost += 1
            self._why_lost = str(error)
            return False
        self._size += written
        self._torn = written < len(data)
        if self._torn:
            self.lost += 1
            self._why_lost = "the disk took only part of a line"
            return False
        if self.lost and self._why_lost:
            text, self._why_lost = f"{self.lost} events were lost: {self._why_lost}", ""
            self.event("not_seen", text=text)
        return True

    def _rotate(self) -> None:
        """Moves the current segment to ``older`` and starts a new one with the preamble."""
        try:
            os.replace(self.path, self.older)  # noqa: PTH105
            fresh = self._open()
        except OSError as error:  # keep appending: an oversized log is better than none
            self._why_lost = str(error)
            self._size = 0
            return
        os.close(self._fd)
        self._fd, self._size, self._torn = fresh, 0, False
        for kept in self._preamble:
            self._write(kept)

    def close(self) -> None:
        with self.lock:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
