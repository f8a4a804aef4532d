"""Runs the command of ``watch --on-hang COMMAND`` beside the watcher, for a limited time."""

from __future__ import annotations

import subprocess
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from moediag.launch import shutdown
from moediag.launch.processes import ENV_LAUNCH, Family
from moediag.launch.watched import end_with_us

LOG = "on-hang.log"
SECONDS = 300.0  # time limit of the command
_GRACES = (1.0, 5.0, 5.0)


class HangCommand:
    """One run of the command. Its output, standard error included, goes to ``folder/on-hang.log``,
    because moediag's own standard output may be a JSON object."""

    def __init__(
        self, command: str, environment: Mapping[str, str], folder: Path, seconds: float = SECONDS
    ) -> None:
        token = uuid.uuid4().hex
        self.folder = folder
        self._seconds = seconds
        self._begun = time.monotonic()
        self._how = ""
        with (folder / LOG).open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S602 - the user's own
                command,
                shell=True,
                env={**environment, ENV_LAUNCH: token},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_us(),
            )
        self._family = Family(self._process.pid, token)
        self._thread = threading.Thread(target=self._wait, name="moediag-on-hang", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            code = self._process.wait(self._seconds)
        except subprocess.TimeoutExpired:
            self._end(f"moediag ended it after {self._seconds:.0f} s")
            return
        took = time.monotonic() - self._begun
        said = f"exit code {code}" if code >= 0 else f"ended by signal {-code}"
        self._how = self._how or f"{said} after {took:.1f} s"

    def _end(self, how: str) -> None:
        self._how = self._how or how
        shutdown.end(self._family, _GRACES)
        self._process.wait()

    def finish(self, wait: bool) -> str:
        """Returns how the command ended, once all its processes have ended. ``wait``: let it run
        until its time limit. A second Ctrl-C ends the waiting."""
        try:
            if wait:
                self._thread.join()
        finally:
            self._end("moediag ended it with the job")
        self._thread.join()
        return f"the --on-hang command: {self._how}; its output is in {self.folder.name}/{LOG}"
