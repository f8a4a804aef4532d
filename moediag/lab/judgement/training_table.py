"""Builds the table of a bug report: loss and gradient norm of every step, variants side by side.

It proves nothing, because most of these bugs do not change the loss; verdicts come from gradients
and weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moediag import protocol
from moediag.records import dataclass
from moediag.result import Cell, Table, TrialResult

if TYPE_CHECKING:
    from moediag.lab.scenario.plan import Plan

_APART = 1e-3  # relative difference of any number from which two references differ


@dataclass(frozen=True, slots=True)
class Curve:
    """One run, step by step."""

    name: str
    verdict: str
    losses: tuple[float, ...] = ()
    """The mean over ranks."""
    norms: tuple[float | None, ...] = ()
    """Rank 0's norms before clipping; None where the library does not report them."""
    reference_losses: tuple[float, ...] = ()
    """The losses of a single process on the same batches."""
    reference_norms: tuple[float, ...] = ()


def tables(plan: Plan, trials: Sequence[TrialResult], folder: Path) -> tuple[Table, ...]:
    """The tables of the run in ``folder``; none for a scenario without a Trainer."""
    trained = {
        p.trial.variant for p in plan.trials if isinstance(p.trial.task, protocol.TrainerTask)
    }
    runs = [t for t in trials if t.variant in trained and t.repeat == 0]
    curves = [curve(t, _outcomes(t, folder)) for t in runs]
    return side_by_side(curves)


def _outcomes(trial: TrialResult, folder: Path) -> Mapping[int, protocol.Outcome]:
    found = {}
    for rank in range(trial.world_size if trial.evidence else 0):
        path = folder / trial.evidence / protocol.outcome_file(rank)
        if path.exists():
            found[rank] = protocol.Outcome.read(path)
    return found


def curve(trial: TrialResult, outcomes: Mapping[int, protocol.Outcome]) -> Curve:
    """The curve of a trial, without numbers unless every rank left some."""
    whole = [outcomes[rank] for rank in sorted(outcomes)]
    if len(whole) < trial.world_size or not all(o.losses for o in whole):
        return Curve(trial.variant, trial.verdict)
    by_step = zip(*(o.losses for o in whole), strict=True)
    return Curve(
        trial.variant,
        trial.verdict,
        tuple(sum(step) / len(whole) for step in by_step),
        tuple(whole[0].gradient_norms),
        tuple(whole[0].reference_losses),
        tuple(whole[0].reference_norms),
    )


def side_by_side(curves: Sequence[Curve]) -> tuple[Table, ...]:
    """One table of losses, one of norms: a row per step, a column per run. Each reference column is
    followed by its runs. Empty where no run has numbers."""
    told = [c for c in curves if c.losses]
    if not told:
        return ()
    absent = ", ".join(f"{c.name} ({c.verdict})" for c in curves if not c.losses)
    note = f"No step of {absent}." if absent else ""
    return (
        _table("Loss of each step, mean over ranks", told, False, note),
        _table("Gradient norm of each step, before clipping", told, True, note),
    )


def _table(title: str, curves: Sequence[Curve], norms: bool, note: str) -> Table:
    groups = _by_reference(curves)
    columns = ["step"]
    series: list[Sequence[float | None]] = []
    for number, group in enumerate(groups):
        first = group[0]
        columns.append("one process" if number == 0 else f"one process ({first.name})")
        series.append(first.reference_norms if norms else first.reference_losses)
        for c in group:
            columns.append(c.name)
            series.append(c.norms if norms else c.losses)
    steps = max(len(s) for s in series)
    rows = tuple((n + 1, *(_cell(s, n) for s in series)) for n in range(steps))
    return Table(title, tuple(columns), rows, note)


def _cell(series: Sequence[float | None], step: int) -> Cell:
    value = series[step] if step < len(series) else None
    if value is None or abs(value) < float("inf"):
        return value
    return str(value)  # JSON has no nan


def _by_reference(curves: Sequence[Curve]) -> list[list[Curve]]:
    """Runs grouped by reference; those of other batches or releases may have another one."""
    groups: list[list[Curve]] = []
    for c in curves:
        alike = next((g for g in groups if _same(g[0], c)), None)
        if alike is None:
            groups.append([c])
        else:
            alike.append(c)
    return groups


def _same(a: Curve, b: Curve) -> bool:
    x = (*a.reference_losses, *a.reference_norms)
    y = (*b.reference_losses, *b.reference_norms)
    return len(x) == len(y) and all(
        abs(i - j) <= _APART * abs(i) for i, j in zip(x, y, strict=True)
    )
