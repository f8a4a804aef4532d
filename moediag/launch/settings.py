"""Options of a launch, and the progress that it reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path

from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """All durations are in seconds."""

    quiescence: float = 3.0
    """Waiting ranks count as hung after this long without progress."""
    patience: float = 30.0
    """In a watched job, ranks may wait this long for an idle rank; see launch.follow.patience."""
    silence: float = 20.0
    """On several nodes, a node is silent after this long without a heartbeat."""
    poll: float = 0.03
    """Time between two samples of the ranks."""
    capture: float = 2.5
    """Upper bound for collecting stacks before the ranks are ended."""
    settle: float = 0.3
    """After a death, its peers get this long to fail by themselves before the capture."""
    graces: tuple[float, float, float] = (0.5, 1.0, 5.0)
    """Time to end after SIGINT, after SIGTERM and after SIGKILL."""
    end: float = 5.0
    """A watched job gets this long between its first signal and SIGKILL. With the capture before it
    and SIGKILL after it, an interruption ends within 10 s, as `docker stop` requires."""
    ready: float = 180.0
    """Upper bound for starting a host, which imports torch and transformers on a busy machine."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables added to those of the ranks."""
    families: tuple[str, ...] = ()
    """Model families that the fork launcher imports before its first trial."""
    nnodes: int = 1
    """Passed to torchrun, like the next two; several nodes need all three and ``shared``."""
    rdzv_endpoint: str | None = None
    node_rank: int | None = None
    shared: Path | None = None
    """A folder that all nodes can reach."""
    job: str = ""
    """The name of this run that all nodes use."""
    stop: threading.Event | None = None
    """Once another thread sets it, the launch ends as after Ctrl-C."""

    @property
    def stopped(self) -> bool:
        return self.stop is not None and self.stop.is_set()


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a running trial at one moment; mappings are by rank unless said otherwise."""

    doing: str
    """launching, running, capturing or ending."""
    states: Mapping[int, str]
    """One of protocol.Heartbeat.STATES, or ``exited``."""
    steps: Mapping[int, int]
    """The training step, from 1; 0 before the first."""
    seconds: float
    """Time since the launch."""
    events: Mapping[int, int] = field(default_factory=dict)
    """Number of events recorded so far."""
    pids: Mapping[int, int] = field(default_factory=dict)
    """Of the ranks whose process is known."""
    tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """In a watched job, by MoE block: the tokens that each expert received last."""
    awaited: str = ""
    """``waiting for node 1 of 2 since 40 s``, if no rank has met the others; ``rank 0 may be slow:
    others have waited for 40 s``."""


OnProgress = Callable[[Progress], None]
