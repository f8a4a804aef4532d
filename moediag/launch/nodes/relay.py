"""Exchange between nodes that do not all share a folder: a relay process copies each node's folder
to the others through the job's own rendezvous store. The relay runs under the job's Python, because
only torch can talk to torch's store, and apart from the ranks, so that its failure cannot harm one.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import moediag
from moediag import protocol
from moediag.launch.nodes.shared_folder import SharedFolder
from moediag.launch.nodes.status import Pulse

RELAY = Path(moediag.__file__).parent / "ranks" / "relay.py"
BEGIN = 60.0  # seconds until the relay's first turn: it imports torch
ANSWER = 15.0  # seconds that a later turn may take
LAST = 3.0  # seconds for the last pulse

T = TypeVar("T")


class RelayedFolder(SharedFolder):
    """A shared folder that a relay process synchronises. ``store``: host and port."""

    def __init__(self, root: Path, job: str, own: str, store: tuple[str, int], python: str) -> None:
        super().__init__(root, job, own)
        self.own.mkdir(parents=True, exist_ok=True)
        self.place = f"{store[0]}:{store[1]}"
        self._turns = 0
        self._refused_there: dict[str, str] = {}  # by the relay
        self._turned = time.monotonic()
        log = root / "relay.log"
        command = [
            python, str(RELAY), store[0], str(store[1]), job, own, str(self.folder.resolve()),
            str(os.getpid()), protocol.PULSE_FILE, protocol.WANT_FILE, protocol.LINK_FILE,
        ]  # fmt: skip
        with log.open("wb") as out:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def want(self) -> None:
        with suppress(OSError):
            (self.own / protocol.WANT_FILE).touch()

    def pulses(self) -> list[Pulse] | None:
        """The others' last pulses; None until the relay has asked the store again. Raises OSError
        when the store no longer answers."""
        now = time.monotonic()
        turns = self._read_turns()
        if turns > self._turns:
            self._turns, self._turned = turns, now
            found = super().pulses()
            self.refused.update(self._refused_there)
            return found
        if self._process.poll() is not None or now - self._turned > (ANSWER if turns else BEGIN):
            raise OSError(0, "does not answer", f"the job's store at {self.place}")
        return None

    def _read_turns(self) -> int:
        with suppress(OSError, ValueError, KeyError, TypeError):
            raw: Any = json.loads((self.folder / protocol.LINK_FILE).read_text(encoding="utf-8"))
            self._refused_there = dict(raw["refused"])
            return int(raw["turns"])
        return 0

    def close(self) -> None:
        """Ends the relay once it has sent the last pulse, or cannot."""
        end, turns = time.monotonic() + LAST, self._read_turns()
        while self._process.poll() is None and time.monotonic() < end:
            if not turns or self._read_turns() >= turns + 2:
                break
            time.sleep(0.05)
        self._process.kill()
        self._process.wait()


class Bridge(SharedFolder):
    """A shared folder that some node may not reach, and the job's store for that node. An error of
    one is none as long as the other works."""

    def __init__(self, shared: SharedFolder, relayed: RelayedFolder) -> None:
        self.folder = shared.folder
        self.own = shared.own
        self.refused = shared.refused
        self._both = (shared, relayed)
        self._newest: dict[str, Pulse] = {}

    def want(self) -> None:
        self._each(lambda one: one.want())

    def put(self, pulse: Pulse) -> None:
        self._each(lambda one: one.put(pulse))

    def pulses(self) -> list[Pulse] | None:
        """Returns the newest pulse of each node."""
        for pulses in self._each(lambda one: one.pulses()):
            for pulse in pulses or ():
                if pulse.key not in self._newest or pulse.seq > self._newest[pulse.key].seq:
                    self._newest[pulse.key] = pulse
        return [*self._newest.values()]

    def publish(self, evidence: Path, number: int) -> list[str]:
        return max(self._each(lambda one: one.publish(evidence, number)), key=len)

    def fetch(self, key: str, number: int, into: Path) -> list[str]:
        return self._each(lambda one: one.fetch(key, number, into), enough=1)[0]

    def close(self) -> None:
        self._each(lambda one: one.close())

    def _each(self, call: Callable[[SharedFolder], T], enough: int = 2) -> list[T]:
        """Returns what the first ``enough`` that work return. Raises OSError if none works."""
        found: list[T] = []
        for one in self._both:
            try:
                found.append(call(one))
            except OSError as error:
                problem = error
            if len(found) == enough:
                break
        if not found:
            raise problem
        return found
