"""Fork hosts that outlive a run. A host starts during the previous run and is kept, because
scenarios share stacks and a bisect probes the neighbours of a boundary twice.

Imports take most of the time of a short run. Each trial is still a separate process, forked from a
host that has only imported.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from moediag.lab.launch.launcher import launcher
from moediag.launch.base import Launcher, StackLike
from moediag.launch.settings import LaunchOptions

KEPT = 4  # idle hosts; each takes about half a gigabyte


class Hosts:
    """One host per stack; logs go to ``folder``. Call :meth:`close` at the end."""

    def __init__(self, folder: Path, options: LaunchOptions) -> None:
        self._folder = folder
        self._options = options
        self._idle: dict[str, Launcher] = {}  # least recently used first
        self._lock = threading.Lock()

    def begin(self, stack: StackLike) -> None:
        """Starts a host for ``stack`` unless one exists."""
        with self._lock:
            if stack.key in self._idle:
                return
            started = launcher("fork", stack, self._folder, self._options)
            self._idle[stack.key] = started.__enter__()
            spare = self._spare()
        _close(spare)

    @contextlib.contextmanager
    def launcher(
        self, kind: str, stack: StackLike, run_folder: Path, options: LaunchOptions
    ) -> Iterator[Launcher]:
        """Like :func:`moediag.lab.launch.launcher.launcher`, but keeps the host after the run."""
        if kind != "fork":
            with launcher(kind, stack, run_folder, options) as one:
                yield one
            return
        with self._lock:
            host = self._idle.pop(stack.key, None)
        if host is None:
            host = launcher(kind, stack, self._folder, options)
            host.__enter__()
        host.options = options
        try:
            yield host
        finally:
            with self._lock:
                other = self._idle.pop(stack.key, None)  # two runs on one stack at once
                self._idle[stack.key] = host
                spare = [*self._spare(), *filter(None, [other])]
            _close(spare)

    def close(self) -> None:
        with self._lock:
            hosts, self._idle = list(self._idle.values()), {}
        _close(hosts)

    def _spare(self) -> list[Launcher]:
        """Removes and returns the least recently used hosts beyond KEPT."""
        return [self._idle.pop(key) for key in list(self._idle)[:-KEPT]]


def _close(hosts: list[Launcher]) -> None:
    for host in hosts:
        host.close()
