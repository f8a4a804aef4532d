"""The diagnosis of one trial: verdict, culprits, cause, and the facts behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from moediag.records import dataclass
from moediag.result.chart_data import ExpertTokens, LayerError, TimedRank
from moediag.result.table import Table
from moediag.result.verdicts import Confidence, Verdict


@dataclass(frozen=True, slots=True)
class RankSide:
    """One rank's side of the first divergence."""

    op: str
    numel: int
    """Elements on the wire."""
    dtype: str
    parameters_missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FirstDivergence:
    """Where the schedules of one group first differ."""

    index: int
    """Position in the group's schedule, counted from 0."""
    axis: str
    phase: str
    module: str
    ranks: Mapping[str, RankSide]
    """Keyed by the rank's number as a string."""

    def __post_init__(self) -> None:
        for rank in self.ranks:
            if not (rank.isascii() and rank.isdecimal() and len(rank) < 10):
                raise ValueError(f"first_divergence.ranks: {rank[:20]!r} is no rank")


@dataclass(frozen=True, slots=True)
class LaneCell:
    """One call of a lane."""

    text: str
    state: str
    """done | open (not known to have completed) | none (no call was made) | unknown."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Ranks whose calls around the divergence are the same."""

    ranks: tuple[int, ...]
    cells: tuple[LaneCell, ...]
    """One for each row."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """The schedules around the first divergence."""

    title: str
    rows: tuple[str, ...]
    at: int
    """The row where ranks diverge."""
    lanes: tuple[Lane, ...]
    left_out: int = 0
    """How many ranks are in lanes that are not shown."""
    calls: Mapping[str, int | None] = field(default_factory=dict)
    """Each rank's call there, by its index in the rank's own log; null where it made none."""

    def __post_init__(self) -> None:
        if any(len(lane.cells) != len(self.rows) for lane in self.lanes):
            raise ValueError(
                f"schedules: a lane without one cell for each of {len(self.rows)} rows"
            )


@dataclass(frozen=True, slots=True)
class RankState:
    """Ranks in the same state at the end."""

    kind: str
    """failed | waiting | elsewhere | finished | ended | unseen."""
    text: str
    """The same in words."""
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Ranks at one line of the user's program when the job stopped."""

    ranks: tuple[int, ...]
    line: str
    """``train.py:96 save``, the innermost line of the user's own code."""
    what: str
    """What they do there: ``waits in barrier``, ``computes``, ``raised ValueError``."""
    callers: tuple[str, ...] = ()
    """The user's lines that led there, innermost first."""
    conditions: tuple[str, ...] = ()
    """Conditions that the other ranks' places do not have: ``under `if rank == 0` at
    train.py:94``; those that name a rank first."""


@dataclass(frozen=True, slots=True)
class PathLine:
    """A line of the user's program that says why ranks are where they are."""

    file: str
    line: int
    text: str
    """As written, without its indentation."""
    acts: tuple[tuple[tuple[int, ...], str], ...]
    """Ranks and what they did there: ``waits in barrier``, ``true``, ``ended``."""
    certain: bool = True
    """False: one of several lines at which they may have parted."""
    indent: int = 0
    """Columns before the text in the file."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the evidence of one trial shows."""

    verdict: Verdict
    signature: str
    confidence: Confidence
    culprits: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    cause: str = ""
    not_seen: tuple[str, ...] = ()
    first_divergence: FirstDivergence | None = None
    gradient_error: float | None = None
    """Largest |gradient - reference| over all ranks, parameters and compared steps; None when
    nothing was compared."""
    worst_parameter: str | None = None
    """The parameter with that error."""
    stacks: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Rank -> frames of the thread that counts, innermost first."""
    wrong_parameters: tuple[str, ...] = ()
    """Wrong parameters of the first step that has any."""
    parameters_compared: int = 0
    """Number of distinct parameters."""
    suspicious: tuple[str, ...] = ()
    """What is most often a mistake, though a healthy job may do it on purpose."""
    notes: tuple[str, ...] = ()
    """Facts that a reader of the result must know."""
    tables: tuple[Table, ...] = ()
    """The numbers behind the verdict, side by side."""
    schedules: SideBySide | None = None
    """The schedules around the first divergence."""
    states: tuple[RankState, ...] = ()
    """The state of each rank of the world at the end."""
    places: tuple[Place, ...] = ()
    """Where the ranks of a user's own job are in the user's code, culprits first."""
    paths: tuple[PathLine, ...] = ()
    """How two groups of ranks came from their last common call to different places, in order."""
    next_step: str = ""
    """What to change, or where to look next."""
    attached: Mapping[str, str] = field(default_factory=dict)
    """What other programs reported about the machine, by title."""
    tokens: ExpertTokens | None = None
    """Of a failure: the block where ranks starve an expert, else the first block."""
    layer_errors: tuple[LayerError, ...] = ()
    """The gradients of the first step with a wrong one, by layer and part of the model."""
    timeline: tuple[TimedRank, ...] = ()
    """When ranks made the calls around the first divergence, if any of them waits there."""
