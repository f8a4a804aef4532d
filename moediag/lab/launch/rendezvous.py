"""Lets the nodes of one `moediag run` wait for each other: at its start, before each trial, at its
end.

Each node writes its own file in the shared folder and reads the others'. No clocks are compared: a
node is lost when the count in its file has not changed for too long by our own clock.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, field, replace
from hashlib import sha256
from pathlib import Path

from moediag.errors import NodeLost, UsageError
from moediag.protocol import build, read_json, write_json
from moediag.records import dataclass

FIRST = 180.0  # seconds that the others get to start: a person types a command on each
PERIOD = 0.5  # seconds between two writes
_POLL = 0.05
_LARGEST = 1 << 20  # bytes of a node's file


@dataclass(frozen=True, slots=True)
class Word:
    """The file of one node."""

    node: int
    host: str
    token: str
    """Identifies this start of the node."""
    plan: str
    """A digest of what the node will run; it must be the same on all nodes."""
    count: int = 0
    """Grows with each write."""
    stage: int = 0
    """How many times the node has waited for the others."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """By stage: why the node cannot run the trial that follows."""
    over: bool = False
    """The node has left."""

    @property
    def name(self) -> str:
        return f"node {self.node} ({self.host})"


class Meeting:
    """The nodes of one run, as node ``node`` of ``nodes`` sees them. ``shared``: a folder that all
    nodes can reach, a new one for every run. ``silence``: a node is lost after this many seconds
    without a write. ``stopped``: whether a wait ends as after Ctrl-C."""

    def __init__(
        self,
        shared: Path,
        node: int,
        nodes: int,
        plan: str,
        silence: float,
        first: float = FIRST,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.shared = shared
        self.silence = silence
        self.first = first
        self._others = [n for n in range(nodes) if n != node]
        self._stopped = stopped
        digest = sha256(plan.encode()).hexdigest()[:16]
        self._own = Word(node, socket.gethostname(), uuid.uuid4().hex, digest)
        self._heard: dict[int, tuple[Word, float]] = {}  # and when its count last grew
        self._refused: dict[int, str] = {}  # why a node's file was not taken
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._speak, name="moediag-meeting", daemon=True)

    def __enter__(self) -> Meeting:
        """Waits for all nodes. Raises UsageError if the folder cannot be used or a node has another
        plan, NodeLost if one does not come."""
        self._claim()
        self._thread.start()
        try:
            self._wait(0, self.first)
            for word, _ in self._heard.values():
                if word.plan != self._own.plan:
                    raise UsageError(
                        f"{word.name} was started with a different command",
                        "Type the same command on every node, of the same version of moediag; only "
                        "--node-rank and --out differ.",
                    )
        except BaseException:
            self.leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    @property
    def token(self) -> str:
        """The name of this run on all nodes: node 0's token, because a folder is used once."""
        return self._own.token if self._own.node == 0 else self._heard[0][0].token

    def meet(self, problem: str = "") -> str:
        """Waits until every node is here. ``problem``: why this node cannot run the next trial.
        Returns the problem of another node, or "". Raises NodeLost if one has left or no longer
        writes."""
        stage = self._own.stage + 1
        problems = {**self._own.problems, **({str(stage): problem} if problem else {})}
        with self._lock:
            self._own = replace(self._own, stage=stage, problems=problems)
        self._wake.set()
        self._wait(stage, self.silence)
        told = (
            f"{word.name}: {word.problems[str(stage)]}"
            for word, _ in (self._heard[n] for n in self._others)
            if str(stage) in word.problems
        )
        return next(told, "")

    def leave(self) -> None:
        """Leaves the run. Safe to call twice."""
        with self._lock:
            self._own = replace(self._own, over=True)
        self._end.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(2 * PERIOD + 5.0)

    # ------------------------------------------------------------------ files

    def _place(self, node: int) -> Path:
        return self.shared / f"node-{node}.json"

    def _claim(self) -> None:
        path = self._place(self._own.node)
        try:
            self.shared.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8"):
                pass
        except FileExistsError as error:
            raise UsageError(
                f"--shared {self.shared}: node {self._own.node} of an earlier or another run was "
                "here",
                "Give a new folder for every run, the same on all nodes, and to each node its own "
                "--node-rank.",
            ) from error
        except OSError as error:
            raise UsageError(
                f"--shared {self.shared} cannot be used: {error.strerror or error}",
                "Give a folder that all nodes reach under this path and can write to.",
            ) from error

    def _speak(self) -> None:
        while True:
            over = self._end.is_set()
            with self._lock:
                self._own = said = replace(self._own, count=self._own.count + 1)
            with suppress(OSError):  # the disk does not answer; other nodes will report it
                write_json(self._place(said.node), asdict(said))
            if over:
                return
            self._wake.wait(PERIOD)
            self._wake.clear()

    def _hear(self, now: float) -> None:
        for node in self._others:
            path = self._place(node)
            known = self._heard.get(node)
            try:
                if path.stat().st_size > _LARGEST:
                    raise ValueError("too large")
                word = build(Word, read_json(path))
                if word.node != node or (known is not None and word.token != known[0].token):
                    raise ValueError("written by another node or another run")
            except OSError:
                continue
            except ValueError as error:
                self._refused[node] = f"; its file is refused ({str(error)[:200]})"
                continue
            self._refused.pop(node, None)
            if known is None or word.count > known[0].count:
                self._heard[node] = word, now

    def _wait(self, stage: int, patience: float) -> None:
        """Waits until every node is at ``stage``; each may take ``patience`` seconds between two
        writes."""
        begun = before = time.monotonic()
        while True:
            if self._stopped():
                raise KeyboardInterrupt
            now = time.monotonic()
            if now - before > self.silence / 2:  # this process did not listen
                begun = now
            before = now
            self._hear(now)
            missing = [n for n in self._others if not self._is_there(n, stage)]
            if not missing:
                return
            for node in missing:
                self._must_live(node, begun, now, patience)
            time.sleep(_POLL)

    def _is_there(self, node: int, stage: int) -> bool:
        return node in self._heard and self._heard[node][0].stage >= stage

    def _must_live(self, node: int, begun: float, now: float, patience: float) -> None:
        known = self._heard.get(node)
        if known is None:
            if now - begun > patience:
                raise NodeLost(
                    f"node {node} did not start in {self.shared} within {patience:.0f} s"
                    + self._refused.get(node, ""),
                    f"Type the same command there with --node-rank {node}.",
                )
            return
        word, arrived = known
        if word.over:
            raise NodeLost(f"{word.name} has left the run")
        if now - max(arrived, begun) > patience:
            raise NodeLost(
                f"{word.name} has sent nothing for {now - max(arrived, begun):.0f} s: it is down, "
                "cut off or stopped" + self._refused.get(node, "")
            )


def job_of(token: str, trial: str) -> str:
    """The key of one trial of the run, the same on all nodes."""
    return sha256(f"{token}/{trial}".encode()).hexdigest()[:32]
