"""Gradients against the reference, over all ranks: the verdict that no loss curve gives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moediag.evidence.model import Evidence


@dataclass(frozen=True, slots=True)
class GradientFacts:
    """``error`` and ``worst``: over everything compared. ``wrong``: FQNs of the first step (from
    1) with any wrong gradient, ``step``; later steps start from weights that are wrong already.
    ``missing``: those of them that some rank has no gradient for. ``ranks``: where it is wrong.
    ``nonfinite``: what is nan or infinite, in words; empty when nothing is. ``measured``: every
    rank reached its end and left its numbers."""

    error: float | None = None
    worst: str | None = None
    compared: int = 0
    wrong: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    step: int | None = None
    ranks: tuple[int, ...] = ()
    nonfinite: str = ""
    nonfinite_ranks: tuple[int, ...] = ()
    measured: bool = False


def gradient_facts(evidence: Evidence) -> GradientFacts:
    outcomes = {r: seen.outcome for r, seen in evidence.ranks.items() if seen.outcome is not None}
    error: float | None = None
    worst: str | None = None
    compared: set[str] = set()
    wrong: dict[int, dict[str, list[int]]] = {}  # step -> FQN -> ranks
    missing: set[tuple[int, str]] = set()
    bad: dict[str, list[int]] = {}
    for rank, outcome in outcomes.items():
        for step, by_fqn in outcome.gradients.items():
            for fqn, gradient in by_fqn.items():
                compared.add(fqn)
                size = number(gradient.max_abs)
                if error is None or _larger(size, error):
                    error, worst = size, fqn
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
    )


def number(value: float | str) -> float:
    """JSON has no nan: workers write it as text. Text that is no number counts as nan."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _larger(a: float, b: float) -> bool:
    """nan is the largest of all."""
    return not math.isnan(b) and (math.isnan(a) or a > b)
