"""What the diagnosis of one trial says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moediag.result.run_result import FirstDivergence, RankState, SideBySide, Table
from moediag.result.verdicts import Confidence, Verdict


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """``gradient_error``: largest |gradient - reference| of all ranks, parameters and compared
    steps, None when nothing was compared; ``wrong_parameters``: of the first step in which any is
    wrong; ``parameters_compared``: distinct parameters. ``stacks``: rank -> frames of the thread
    that counts, innermost first. ``notes``: facts a reader of the result must know;
    ``tables``: the numbers behind them, side by side. ``schedules``: around the first divergence;
    ``states``: how ranks stood at the end. ``attached``: what other programs said, by title;
    ``nccl``: the version that the ranks ran on, "" without."""

    verdict: Verdict
    signature: str
    confidence: Confidence
    culprits: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    cause: str = ""
    first_divergence: FirstDivergence | None = None
    gradient_error: float | None = None
    worst_parameter: str | None = None
    wrong_parameters: tuple[str, ...] = ()
    parameters_compared: int = 0
    not_seen: tuple[str, ...] = ()
    stacks: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    backend: str = ""
    tables: tuple[Table, ...] = ()
    schedules: SideBySide | None = None
    states: tuple[RankState, ...] = ()
    attached: Mapping[str, str] = field(default_factory=dict)
    nccl: str = ""
