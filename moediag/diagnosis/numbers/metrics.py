"""Checks metrics reduced over ranks: equal on all ranks, and equal to a single process's.

Training may be correct while its report is not. Ranks that reduce names in different orders mix two
metrics, and a rank that contributes a zero for a metric it does not have shrinks the mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from moediag.diagnosis.numbers import agreement
from moediag.diagnosis.numbers.gradients import number
from moediag.evidence.model import Evidence
from moediag.records import dataclass
from moediag.result import Cell, Table

TABLE = "Metrics as each rank reports them, and in a single process"
DIFFER, ALIKE = "metrics differ between ranks", "metrics equal on all ranks"
_SAME = 1e-4  # relative: the order of summation differs
_MOST_RANKS = 4


@dataclass(frozen=True, slots=True)
class MetricFacts:
    """The wrong metrics of the first step that has any."""

    step: int | None = None
    """From 1; None where all metrics are right."""
    pattern: str = ""
    """DIFFER or ALIKE."""
    wrong: Mapping[str, Mapping[int, float]] | None = None
    """Name -> rank -> the value that it reports."""
    right: Mapping[str, float] | None = None
    """Name -> the value of a single process."""
    swapped: tuple[tuple[int, str, int, str], ...] = ()
    """(rank, its name, other rank, its name) of metrics with the same value."""
    compared: int = 0
    table: Table | None = None


def metric_facts(evidence: Evidence) -> MetricFacts:
    """Compares metrics with the true values where they are known, else only between ranks."""
    outcomes = {r: seen.outcome for r, seen in evidence.ranks.items() if seen.outcome is not None}
    steps = sorted({int(step) for o in outcomes.values() for step in o.metrics})
    compared: set[str] = set()
    for step in steps:
        held: dict[str, dict[int, float]] = {}
        right: dict[str, float] = {}
        for rank, outcome in sorted(outcomes.items()):
            for name, value in outcome.metrics.get(str(step), {}).items():
                held.setdefault(name, {})[rank] = number(value)
            for name, value in outcome.reference_metrics.get(str(step), {}).items():
                right[name] = number(value)
        compared |= set(held)
        wrong = {name: by for name, by in held.items() if _is_wrong(by, right.get(name))}
        if wrong:
            apart = any(not _equal(list(by.values())) for by in wrong.values())
            return MetricFacts(
                step,
                DIFFER if apart else ALIKE,
                wrong,
                right,
                _swapped(wrong) if apart else (),
                len(held),
                _table(step, held, right),
            )
    return MetricFacts(compared=len(compared))


def _is_wrong(by_rank: Mapping[int, float], right: float | None) -> bool:
    values = list(by_rank.values())
    return not _equal(values if right is None else [*values, right])


def _equal(values: list[float]) -> bool:
    """Whether all values are equal; nan equals only nan."""
    if any(map(math.isnan, values)):
        return all(map(math.isnan, values))
    return not agreement.apart(values, _SAME)


def _swapped(wrong: Mapping[str, Mapping[int, float]]) -> tuple[tuple[int, str, int, str], ...]:
    """Swapped metrics, each pair of names once."""
    names = list(wrong)
    found: dict[frozenset[str], tuple[int, str, int, str]] = {}
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            for a, value in wrong[one].items():
                for b, same in wrong[other].items():
                    if a != b and _equal([value, same]):
                        found.setdefault(frozenset((one, other)), (a, one, b, other))
    return tuple(found.values())


def sentence(facts: MetricFacts) -> str:
    """What is wrong; "" where every metric is right."""
    if facts.step is None or not facts.wrong:
        return ""
    right = facts.right or {}
    pieces = []
    for name, by_rank in facts.wrong.items():
        if facts.pattern == ALIKE:
            text = f"{next(iter(by_rank.values())):.6g} on every rank"
        else:
            few = list(by_rank.items())[:_MOST_RANKS]
            text = ", ".join(f"rank {rank} {value:.6g}" for rank, value in few)
            text += f" and {len(by_rank) - len(few)} more" if len(by_rank) > len(few) else ""
        truth = f" (single process {right[name]:.6g})" if name in right else ""
        pieces.append(f"`{name}` {text}{truth}")
    lead = (
        "reduced metrics differ between ranks" if facts.pattern == DIFFER else "metrics are wrong"
    )
    said = f"In step {facts.step} {lead}: {'; '.join(pieces)}."
    for rank, name, other, its in facts.swapped:
        said += f" What rank {rank} calls `{name}` is what rank {other} calls `{its}`."
    return said


def _table(step: int, held: Mapping[str, Mapping[int, float]], right: Mapping[str, float]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (step, name, rank, value, right.get(name))
        for name, by_rank in held.items()
        for rank, value in by_rank.items()
    ]
    return Table(TABLE, ("step", "metric", "rank", "reported", "single process"), tuple(rows))
