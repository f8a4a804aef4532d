"""One look at one rank: what the supervisors of a launch decide by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankSample:
    """A rank of this node, or of another as its supervisor there described it."""

    rank: int
    known: bool = True
    """Its process is known."""
    alive: bool = True
    """It runs."""
    state: str = "starting"
    """One of the heartbeat's states."""
    progress: int = -1
    """The heartbeat's counter; -1 without a heartbeat."""
    step: int = 0
    time: float = 0.0
    """When the heartbeat last changed."""
    cpu: float = 0.0
    """Seconds of CPU time so far."""
    runnable: bool = False
    """Its main thread runs, wants to run, or waits for a disk (R or D in /proc)."""
    stopped: bool = False
    """SIGSTOP stopped it."""
    at: float | None = None
    """Of a rank on another node: when its supervisor looked, on a clock of that node."""
    work: str = ""
    """Of a rank on another node: what its stack says that it does."""
    on_device: bool = False
    """Of a rank on another node: its stack says that it waits for its device."""
    blocked: bool = False
    """Of a rank on another node: its stack says that it is in a collective."""
    looked: bool = True
    """Whether the supervisor of another node looked at stacks in this pause."""
    silent: bool = False
    """Nothing comes from its node any more."""
    unseen: bool = False
    """Nothing ever came from its node."""


def states(samples: Sequence[RankSample]) -> Mapping[int, str]:
    """What each rank does, for the live display."""
    return {s.rank: s.state if s.alive or not s.known else "exited" for s in samples}
