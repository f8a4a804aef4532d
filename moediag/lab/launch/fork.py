"""The fork launcher: one host process per stack, which forks each trial."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from moediag.errors import LaunchError
from moediag.launch import signals
from moediag.launch.base import (
    Follow,
    Launcher,
    Running,
    StackLike,
    json_lines,
    last_words,
)
from moediag.launch.processes import Family, oom_kills
from moediag.launch.settings import LaunchOptions
from moediag.protocol import TRIAL_FILE, Trial

HOST_LOG = "host.log"


class Host:
    """The host process (see ranks.host) and the two pipes to it."""

    def __init__(
        self, command: list[str], env: dict[str, str], log: Path, options: LaunchOptions
    ) -> None:
        self._options = options
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("ab") as errors:
            try:
                self._process = subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,
                )
            except OSError as error:
                raise LaunchError(f"{command[0]}: {error.strerror}") from error
        self._pending = b""
        self._ready = False
        self._killed_before = oom_kills() or 0
        self._exits: dict[int, int] = {}  # trial pid -> code

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, seconds: float) -> None:
        """Waits until the imports are done. Raises LaunchError if the host dies or takes longer."""
        if not self._ready:
            self._expect("ready", seconds)
            self._ready = True

    def start(self, request: dict[str, Any], seconds: float) -> int:
        """Requests a trial; returns its process id."""
        self._exits.clear()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._death() from error
        return int(self._expect("started", seconds)["pid"])

    def exit_code(self, pid: int) -> int | None:
        """The trial's exit code; None while it runs. Raises LaunchError if the host is gone."""
        while pid not in self._exits:
            events = self._read(0.0)
            if not events:
                return None
            self._note(events)
        return self._exits[pid]

    def close(self) -> None:
        """Ends the host and its trials by closing its standard input; kills it if that fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            # A host that is importing does not read its input, so do not wait for it.
            self._process.wait(2.0 if self._ready else 0.0)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()

    def _death(self) -> BaseException:
        """Returns what the end of the host means. A signal that also ends moediag (Ctrl-C, a
        scheduler) is an interruption, whichever of the two it reached first."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(2.0)
            if -code in signals.ENDING:
                return KeyboardInterrupt()
            if code < 0:
                sig = signal.Signals(-code)
                killed = sig == signal.SIGKILL and (oom_kills() or 0) > self._killed_before
                memory = " for memory (the kernel's OOM killer ran meanwhile)" * killed
                return LaunchError(
                    f"the launcher's host was ended by {sig.name}{memory}: {self.log}"
                )
        return LaunchError(f"the launcher's host died:\n{last_words(self.log)}")

    def _expect(self, kind: str, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while True:
            if self._options.stopped:
                raise KeyboardInterrupt
            left = deadline - time.monotonic()
            if left <= 0:
                raise LaunchError(f"the host did not say {kind!r} in {seconds:.0f} s ({self.log})")
            events = self._read(min(left, 0.5))
            self._note(events)
            for event in events:
                if event["e"] == kind:
                    return event

    def _note(self, events: list[dict[str, Any]]) -> None:
        self._exits.update({int(e["pid"]): int(e["code"]) for e in events if e["e"] == "exited"})

    def _read(self, seconds: float) -> list[dict[str, Any]]:
        """Returns reports that arrive within ``seconds``. Raises LaunchError if the pipe closes."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        if not select.select([fd], [], [], seconds)[0]:
            return []
        chunk = os.read(fd, 65536)
        if not chunk:
            raise self._death()
        whole, newline, rest = (self._pending + chunk).rpartition(b"\n")
        self._pending = rest
        return json_lines((whole + newline).decode(errors="replace"))


class ForkedTrial(Running):
    def __init__(self, host: Host, root: int, token: str) -> None:
        self._host = host
        self.root = root
        self.family = Family(root, token, keep=[host.pid])

    def poll(self) -> int | None:
        return self._host.exit_code(self.root)


class ForkLauncher(Launcher):
    """Starts the host on entry, so that its imports overlap with the caller's work, and restarts it
    if it dies."""

    kind = "fork"

    def __init__(
        self, stack: StackLike, run_folder: Path, options: LaunchOptions, follow: Follow
    ) -> None:
        super().__init__(stack, run_folder, options, follow)
        self._host: Host | None = None

    def __enter__(self) -> ForkLauncher:
        self._living_host()
        return self

    def close(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.close()

    def _living_host(self) -> Host:
        if self._host is not None and not self._host.running:
            self.close()
        if self._host is None:
            command = [
                str(self.stack.python),
                "-m",
                "moediag.lab.ranks.host",
                *self.options.families,
            ]
            log = self.run_folder / f"stack-{self.stack.key}" / HOST_LOG
            self._host = Host(command, self.environment(), log, self.options)
        return self._host

    def _start(self, trial: Trial, folder: Path) -> Running:
        host = self._living_host()
        host.wait_ready(self.options.ready)
        single = trial.alone
        request = {
            "trial": str(folder / TRIAL_FILE),
            "folder": str(folder),
            "nproc": self.local_ranks(trial),
            "single": single,
            "families": [trial.model.family],
            "environment": _SINGLE if single else {},
        }
        # A new family is imported before the fork, which may take as long as the first imports.
        root = host.start(request, self.options.ready)
        return ForkedTrial(host, root, self.token)


# What the elastic agent would set for a single rank. Port 0: the store picks a free port.
_SINGLE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
}  # fmt: skip
