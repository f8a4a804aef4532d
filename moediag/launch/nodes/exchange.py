"""The thread that exchanges messages with other nodes. Only it touches the shared folder, so that a
disk that does not answer blocks nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path

from moediag.launch.nodes.relay import Bridge, RelayedFolder
from moediag.launch.nodes.shared_folder import SharedFolder
from moediag.launch.nodes.status import Pulse
from moediag.records import dataclass

PERIOD = 0.5  # seconds between two pulses of a job on a few nodes
_PER_NODE = 0.05  # seconds more per node: every node reads all others


@dataclass(frozen=True, slots=True)
class Heard:
    """The pulses that existed at one time."""

    time: float
    """time.monotonic()"""
    pulses: tuple[Pulse, ...]
    fetched: Mapping[str, int] = field(default_factory=dict)
    """By key: the number of the evidence that was copied from that node."""


class Exchange:
    """Sends our pulse and reads the others'. ``into``: the folder for other nodes' evidence."""

    def __init__(self, shared: SharedFolder, own: Pulse, evidence: Path, into: Path) -> None:
        self.shared = shared
        self.error = ""
        self._own = own
        self._evidence = evidence
        self._into = into
        self._lock = threading.Lock()
        self._heard: Heard | None = None
        self._fetched: dict[str, int] = {}
        self._left_out: list[str] = []
        self._asked = 0  # number of the evidence to publish
        self._wanted = False
        self._nodes = 0  # other nodes that send pulses
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moediag-nodes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def bridge(self, relayed: RelayedFolder) -> None:
        """Exchanges messages through the job's store, too."""
        with self._lock:
            published = self._own.published
        if published:
            relayed.publish(self._evidence, published)
        if self._wanted:
            relayed.want()
        self.shared = Bridge(self.shared, relayed)

    def say(self, **values: object) -> None:
        """Replaces fields of our next pulse."""
        with self._lock:
            self._own = replace(self._own, **values)  # type: ignore[arg-type]

    @property
    def next_seq(self) -> int:
        """The number of a pulse that is not written yet."""
        with self._lock:
            return self._own.seq + 2

    def heard(self) -> Heard | None:
        """Returns what was received since the last call; None if nothing was."""
        with self._lock:
            heard, self._heard = self._heard, None
        return heard

    def publish(self) -> None:
        """Requests the publication of our present evidence."""
        with self._lock:
            self._asked += 1
        self._wake.set()

    def want(self) -> None:
        """Requests fetching the others' evidence, now and whenever they publish more."""
        self._wanted = True
        self.shared.want()
        self._wake.set()

    @property
    def carried(self) -> bool:
        """Whether messages go through the job's store, which may end with the job."""
        return isinstance(self.shared, (Bridge, RelayedFolder))

    @property
    def published(self) -> bool:
        with self._lock:
            return self._own.published >= self._asked

    @property
    def left_out(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._left_out)

    def close(self, seconds: float, publish: bool = True) -> None:
        """Sends the last pulse and, with ``publish``, the evidence as it is now, for at most
        ``seconds``."""
        self.say(over=True)
        if publish:
            self.publish()
        self._stop.set()
        self._wake.set()
        self._thread.join(seconds)

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        while True:
            over = self._stop.is_set()
            try:
                self._turn()
                self.error = ""
            except OSError as error:
                self.error = f"{error.filename or self.shared.folder} {error.strerror or error}"
            except Exception as error:
                self.error = repr(error)
            if over:
                return
            self._wake.wait(self._own.period)
            self._wake.clear()

    def _turn(self) -> None:
        with self._lock:
            asked, own = self._asked, self._own
        if asked > own.published:
            left = self.shared.publish(self._evidence, asked)
            self.say(published=asked)
            with self._lock:
                self._left_out += [f"{name} was not given to the other nodes" for name in left]
        pulses = self.shared.pulses()
        self._nodes = self._nodes if pulses is None else len(pulses)
        for pulse in (pulses or ()) if self._wanted else ():
            if pulse.published > self._fetched.get(pulse.key, 0):
                try:
                    left = self.shared.fetch(pulse.key, pulse.published, self._into / pulse.key)
                except FileNotFoundError:  # not visible yet, or never there
                    continue
                with self._lock:
                    self._fetched[pulse.key] = pulse.published
                    self._own = replace(self._own, has=dict(self._fetched))
                    self._left_out += [f"{pulse.name}: {name} (too large)" for name in left]
        with self._lock:
            period = max(PERIOD, _PER_NODE * self._nodes)
            said = replace(self._own, seq=self._own.seq + 1, period=period)
        self.shared.put(said)
        with self._lock:
            self._own = replace(self._own, seq=said.seq, period=period)
            if pulses is None:
                return
            self._heard = Heard(time.monotonic(), tuple(pulses), dict(self._fetched))
