"""What happens to the program once all of its ranks have measured enough."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable

from moediag.protocol.measured import MEASURED_ENOUGH

_DISTURBED = 5.0  # seconds until an exception after the last measured step is the program's own
_EVERY = 0.05  # seconds between two looks


class Continuing:
    """The program continues when it has been measured."""

    def begin(self) -> None:
        pass

    def wait(self, seconds: float = math.inf) -> None:
        pass


class Ending:
    """The end of this process. Another rank may wait for this one in a collective of the last
    measured step, so it ends only when the control side has seen the answers of all ranks."""

    def __init__(self, folder: Path, at_end: Callable[[], None]) -> None:
        self._file = folder / MEASURED_ENOUGH
        self._at_end = at_end
        self._begun = False

    def begin(self) -> None:
        """Ends this process once all ranks have measured enough."""
        if not self._begun:
            self._begun = True
            sys.excepthook = self._hook(sys.excepthook)
            threading.Thread(target=self._end, name="moediag verify", daemon=True).start()

    def wait(self, seconds: float = math.inf) -> None:
        """Called where another step begins: the program may write or delete files in it. Not for
        ever in its forward: the first stage of a pipeline must send before the next one begins."""
        until = time.monotonic() + seconds
        while self._begun and time.monotonic() < until:
            time.sleep(_EVERY)

    def _hook(self, original: Any) -> Any:
        """Returns a handler of uncaught exceptions: ranks that end disturb those that still
        communicate, which is no failure of the program."""

        def excepthook(*given: Any) -> None:
            self.wait(_DISTURBED)
            original(*given)

        return excepthook

    def _end(self) -> None:
        while not self._file.exists():
            time.sleep(_EVERY)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        try:
            self._at_end()
        finally:
            os._exit(0)
