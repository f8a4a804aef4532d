"""Numbers of a diagnosis that a view may draw. Text for people is elsewhere."""

from __future__ import annotations

from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class ExpertTokens:
    """Tokens that ranks routed to the experts of one MoE block in one step."""

    block: str
    step: int
    """From 1."""
    ranks: tuple[tuple[int, ...], ...]
    """The ranks of each row; several if the job has many."""
    counts: tuple[tuple[int, ...], ...]
    """For each row, the tokens of each expert: the fewest of the row's ranks."""


@dataclass(frozen=True, slots=True)
class LayerError:
    """Gradients of one part of one layer against the reference, over all ranks."""

    layer: str
    """``layer 1``; empty for what is outside the layers."""
    part: str
    """experts | router | all others | inputs of the MoE blocks."""
    compared: int
    """Number of tensors."""
    wrong: int
    """How many of them are wrong on any rank."""
    error: float
    """The largest |gradient - reference|."""
    scale: float
    """The largest |reference|."""


@dataclass(frozen=True, slots=True)
class TimedCall:
    """One call of a rank."""

    text: str
    begin: float
    """Seconds since the earliest call that is shown, by the rank's own clock."""
    state: str
    """done | open (not known to have completed)."""


@dataclass(frozen=True, slots=True)
class TimedRank:
    """One rank's calls around the first divergence."""

    ranks: tuple[int, ...]
    """This rank, and others with the same calls."""
    calls: tuple[TimedCall, ...]
    at: int | None
    """Which of them is the call of the divergence; None if the rank did not make it."""
