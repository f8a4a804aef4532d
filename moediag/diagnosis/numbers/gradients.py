"""Compares gradients of all ranks with the reference, which no loss curve shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moediag.evidence.model import Evidence
from moediag.records import dataclass

if TYPE_CHECKING:
    from moediag.protocol import Outcome


@dataclass(frozen=True, slots=True)
class GradientFacts:
    """Gradients of all ranks compared with the reference.

    In the first step with a wrong gradient: later steps start from weights that are already wrong.
    """

    error: float | None = None
    """The largest error of a wrong gradient; of any gradient where none is wrong."""
    worst: str | None = None
    """The FQN with that error."""
    compared: int = 0
    """Number of distinct parameters."""
    wrong: tuple[str, ...] = ()
    """FQNs of the wrong gradients."""
    missing: tuple[str, ...] = ()
    """Wrong gradients that some rank does not have at all."""
    step: int | None = None
    """The first step with a wrong gradient, from 1."""
    ranks: tuple[int, ...] = ()
    """Ranks with a wrong gradient."""
    nonfinite: str = ""
    """What is nan or infinite, in words; empty where nothing is."""
    nonfinite_ranks: tuple[int, ...] = ()
    measured: bool = False
    """Every rank reached its end and left its numbers."""
    loss_error: float | None = None
    """|mean loss of the ranks - reference loss| of the first wrong step (of step 1 without one),
    relative to the reference; None where the losses were not compared."""


def gradient_facts(evidence: Evidence) -> GradientFacts:
    outcomes = {r: seen.outcome for r, seen in evidence.ranks.items() if seen.outcome is not None}
    largest: dict[int, tuple[float, str]] = {}  # step -> error, FQN
    # The same for wrong gradients only: bf16 rounding can change a larger parameter more.
    worst_of: dict[int, tuple[float, str]] = {}
    compared: set[str] = set()
    wrong: dict[int, dict[str, list[int]]] = {}  # step -> FQN -> ranks
    missing: set[tuple[int, str]] = set()
    bad: dict[str, list[int]] = {}
    for rank, outcome in outcomes.items():
        for step, by_fqn in outcome.gradients.items():
            for fqn, gradient in by_fqn.items():
                compared.add(fqn)
                size = number(gradient.max_abs)
                if int(step) not in largest or _larger(size, largest[int(step)][0]):
                    largest[int(step)] = size, fqn
                if gradient.wrong and (
                    int(step) not in worst_of or _larger(size, worst_of[int(step)][0])
                ):
                    worst_of[int(step)] = size, fqn
                if not math.isfinite(size):
                    bad.setdefault(f"the gradient of {fqn} is {size}", []).append(rank)
                if gradient.wrong:
                    wrong.setdefault(int(step), {}).setdefault(fqn, []).append(rank)
                    if gradient.missing:
                        missing.add((int(step), fqn))
        for what, values in (("loss", outcome.losses), ("gradient norm", outcome.gradient_norms)):
            for step_number, value in enumerate(values or (), start=1):
                if value is not None and not math.isfinite(size := number(value)):
                    bad.setdefault(f"the {what} of step {step_number} is {size}", []).append(rank)
    first = min(wrong, default=None)
    names = wrong.get(first, {}) if first is not None else {}
    what_is_bad = next(iter(bad), "")
    error, worst = worst_of[first] if first is not None else _largest(largest)
    return GradientFacts(
        error=error,
        worst=worst if error else None,
        compared=len(compared),
        wrong=tuple(names),
        missing=tuple(fqn for fqn in names if (first, fqn) in missing),
        step=first,
        ranks=tuple(sorted({rank for ranks in names.values() for rank in ranks})),
        nonfinite=what_is_bad,
        nonfinite_ranks=tuple(sorted(set(bad.get(what_is_bad, ())))),
        measured=len(outcomes) >= evidence.world_size > 0,
        loss_error=_loss_error(list(outcomes.values()), first or 1),
    )


def _largest(by_step: Mapping[int, tuple[float, str]]) -> tuple[float | None, str | None]:
    found: tuple[float | None, str | None] = (None, None)
    for size, fqn in by_step.values():
        if found[0] is None or _larger(size, found[0]):
            found = size, fqn
    return found


def _loss_error(outcomes: Sequence[Outcome], step: int) -> float | None:
    """The relative loss error. A mean over ranks, because all ranks have equally many tokens."""
    losses = [number(o.losses[step - 1]) for o in outcomes if len(o.losses) >= step]
    expected = next(
        (o.reference_losses[step - 1] for o in outcomes if len(o.reference_losses) >= step), None
    )
    if not losses or not expected:
        return None
    return abs(sum(losses) / len(losses) - expected) / abs(expected)


def number(value: float | str) -> float:
    """``value`` as a float. JSON has no nan, so workers write it as text; other text is nan."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _larger(a: float, b: float) -> bool:
    """Whether ``a`` is larger, where nan is the largest."""
    return not math.isnan(b) and (math.isnan(a) or a > b)
