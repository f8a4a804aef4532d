"""Builds environments that will probably be needed next, while the present items run.

Each has its own low-priority process (a thread could not be ended on Ctrl-C while uv works). A
builder detects the end of its pipe, so it ends with this process however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping

MOST = 2  # at the same time
NICE = 10
_PATIENCE = 10.0  # seconds between a stop request to a builder and its kill


class Ahead:
    """The running builders, by name."""

    def __init__(self) -> None:
        self._builders: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()

    def build(self, name: str, request: Mapping[str, str]) -> None:
        """Starts to build ``request``, unless ``name`` was started before or :data:`MOST` builders
        are running. Errors are not reported."""
        with self._lock:
            busy = [n for n, b in self._builders.items() if b.poll() is None]
            if name in self._builders or len(busy) >= MOST:
                return
            self._builders[name] = subprocess.Popen(
                [sys.executable, "-m", "moediag.lab.campaign.prebuild", json.dumps(dict(request))],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process, which ends the builder
            )

    def working(self) -> list[str]:
        with self._lock:
            return [name for name, builder in self._builders.items() if builder.poll() is None]

    def end(self, name: str) -> None:
        """Ends the builder of ``name`` if it is still running."""
        with self._lock:
            builder = self._builders.get(name)
        if builder is not None:
            _end([builder])

    def close(self) -> None:
        """Ends all of them."""
        with self._lock:
            builders = list(self._builders.values())
        _end(builders)


def _end(builders: list[subprocess.Popen[bytes]]) -> None:
    for builder in builders:
        if builder.poll() is None:
            builder.terminate()
    for builder in builders:
        try:
            builder.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(builder.pid, signal.SIGKILL)
            builder.wait()
        if builder.stdin is not None:
            builder.stdin.close()


# ------------------------------------------------------------------------ the builder


def main(text: str) -> int:
    """Builds the environment and imports a new one once, because its first import compiles it."""
    from moediag.errors import MoediagError
    from moediag.lab.stacks.environment import ensure, ready
    from moediag.lab.stacks.first_import import import_once
    from moediag.launch import signals

    threading.Thread(target=_ends_with_parent, daemon=True).start()
    with contextlib.suppress(OSError):
        os.nice(NICE)
    try:
        with signals.as_interrupts(for_good=True):
            request = json.loads(text)
            if ready(request) is None:
                import_once(ensure(request))
    except (MoediagError, KeyboardInterrupt):
        return 1  # the item that needs it reports the error
    return 0


def _ends_with_parent() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
