"""What a launcher can be told, and what it tells while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """All durations in seconds.

    ``quiescence``: how long nothing may move before waiting ranks count as hung.
    ``patience``: of a watched job, how long ranks may wait for one that does nothing; see
    launch.patience.
    ``silence``: of a watched job on several nodes, after how long without a word a node is silent.
    ``capture``: bound on collecting stacks before the ranks are ended.
    ``settle``: after a death, how long its peers get to fail by themselves before the capture.
    ``graces``: how long each step of the ladder interrupt, terminate, kill waits.
    ``ready``: bound on starting a host (importing torch and transformers on a loaded box).
    ``environment``: variables added to those of the ranks.
    ``families``: model families that the fork launcher imports before its first trial.
    ``stop``: once another thread sets it, what runs ends as after Ctrl-C.
    ``nnodes``, ``rdzv_endpoint``, ``node_rank``: passed to torchrun; several nodes need all three,
    and ``shared``, a folder that all of them reach. ``job``: what they call this run.
    """

    quiescence: float = 3.0
    patience: float = 30.0
    silence: float = 20.0
    poll: float = 0.03
    capture: float = 2.5
    settle: float = 0.3
    graces: tuple[float, float, float] = (0.5, 1.0, 5.0)
    ready: float = 180.0
    environment: Mapping[str, str] = field(default_factory=dict)
    families: tuple[str, ...] = ()
    nnodes: int = 1
    rdzv_endpoint: str | None = None
    node_rank: int | None = None
    shared: Path | None = None
    job: str = ""
    stop: threading.Event | None = None

    @property
    def stopped(self) -> bool:
        return self.stop is not None and self.stop.is_set()


@dataclass(frozen=True, slots=True)
class Progress:
    """A glance at a running trial. ``doing``: launching, running, capturing or ending;
    ``states``: by rank, one of protocol.Heartbeat.STATES, or ``exited``; ``steps``: the training
    step (from 1, 0 before it); ``seconds`` since the launch; ``events``: how much each rank
    recorded so far; ``pids`` of those that are known; ``tokens``: of a watched job, by MoE block,
    what its experts got last."""

    doing: str
    states: Mapping[int, str]
    steps: Mapping[int, int]
    seconds: float
    events: Mapping[int, int] = field(default_factory=dict)
    pids: Mapping[int, int] = field(default_factory=dict)
    tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)


OnProgress = Callable[[Progress], None]
