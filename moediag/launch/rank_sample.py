"""The observed state of one rank, which the supervisors of a launch use to decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class RankSample:
    """A rank of this node, or of another node as described by its supervisor."""

    rank: int
    known: bool = True
    """Its process is known."""
    alive: bool = True
    """Its process runs."""
    state: str = "starting"
    """One of the heartbeat's states."""
    progress: int = -1
    """The heartbeat's counter; -1 without a heartbeat."""
    step: int = 0
    begun: bool = False
    """It has taken a batch or run a model, or is beyond its first step."""
    time: float = 0.0
    """When the heartbeat last changed."""
    cpu: float = 0.0
    """Seconds of CPU time so far."""
    runnable: bool = False
    """Its main thread runs, is ready to run, or waits for a disk (R or D in /proc)."""
    stopped: bool = False
    """SIGSTOP stopped it."""
    at: float | None = None
    """On another node: when its supervisor looked, by that node's clock."""
    work: str = ""
    """On another node: the work that its stack shows."""
    on_device: bool = False
    """On another node: its stack shows that it waits for its device."""
    blocked: bool = False
    """On another node: its stack shows that it is in a collective."""
    looked: bool = True
    """On another node: its supervisor read stacks in this pause."""
    silent: bool = False
    """Its node no longer sends heartbeats."""
    unseen: bool = False
    """Its node never sent a heartbeat."""

    @property
    def prepares(self) -> bool:
        """Whether it has not begun to train, as far as it is known."""
        return not (self.begun or self.unseen)


def states(samples: Sequence[RankSample]) -> Mapping[int, str]:
    """Returns the state of each rank, for the live display."""
    return {s.rank: s.state if s.alive or not s.known else "exited" for s in samples}
