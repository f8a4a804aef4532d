"""Builds tables of a whole run: tables that several variants have, side by side, and how
often an intermittent failure occurred."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from moediag.result import Cell, Table, TrialResult, Verdict

_ABOUT_WEIGHTS = (Verdict.WRONG_WEIGHTS,)
_HELD = "Experts held by each rank"
Key = tuple[str, tuple[str, ...]]
_Z = 1.96  # of a 95 % interval


def together(trials: Sequence[TrialResult]) -> tuple[tuple[TrialResult, ...], tuple[Table, ...]]:
    """The trials without the tables that several variants have, and the tables of the run: those
    tables with the variant as first column, and the rates of repeated trials."""
    trials = _to_the_point(trials)
    variants: dict[Key, dict[str, None]] = {}
    for trial in trials:
        for table in trial.tables:
            variants.setdefault(_key(table), {})[trial.variant] = None
    shared = [key for key, names in variants.items() if len(names) > 1]  # in order of appearance
    rows: dict[Key, dict[tuple[Cell, ...], None]] = {key: {} for key in shared}
    notes: dict[Key, dict[str, None]] = {key: {} for key in shared}
    left = []
    for trial in trials:
        for table in trial.tables:
            if _key(table) in shared:  # equal rows of repeats appear once
                rows[_key(table)] |= {(trial.variant, *row): None for row in table.rows}
                notes[_key(table)] |= {table.note: None} if table.note else {}
        own = tuple(table for table in trial.tables if _key(table) not in shared)
        left.append(trial.diagnosed(tables=own))
    merged = [
        Table(title, ("variant", *columns), tuple(rows[title, columns]), " ".join(found))
        for (title, columns), found in notes.items()
    ]
    rates = repeats_table(trials)
    return tuple(left), (*merged, *((rates,) if rates is not None else ()))


def _to_the_point(trials: Sequence[TrialResult]) -> list[TrialResult]:
    """The trials, with the tables of expert holders only where some trial has wrong weights."""
    if any(trial.verdict in _ABOUT_WEIGHTS for trial in trials):
        return list(trials)
    return [
        t.diagnosed(tables=tuple(x for x in t.tables if not x.title.startswith(_HELD)))
        for t in trials
    ]


def _key(table: Table) -> Key:
    return table.title, table.columns


def repeats_table(trials: Sequence[TrialResult]) -> Table | None:
    """Verdicts of each repeated variant, with their rates and 95 % intervals (Wilson's: it holds
    for few trials and for rates near 0 and 1); None without repeats."""
    by_variant: dict[str, list[TrialResult]] = {}
    for trial in trials:
        by_variant.setdefault(trial.variant, []).append(trial)
    rows = []
    for variant, own in by_variant.items():
        if len(own) == 1:
            continue
        for verdict, times in Counter(t.verdict for t in own).most_common():
            low, high = interval(times, len(own))
            rows.append((variant, verdict, f"{times} of {len(own)}", f"{low:.0%} to {high:.0%}"))
    if not rows:
        return None
    return Table(
        title="Verdicts over repeats",
        columns=("variant", "verdict", "times", "95 % interval of its rate"),
        rows=tuple(rows),
    )


def interval(times: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate that occurred ``times`` in ``of`` trials (at least one)."""
    rate, square = times / of, _Z * _Z / of
    middle = (rate + square / 2) / (1 + square)
    half = _Z * math.sqrt(rate * (1 - rate) / of + square / (4 * of)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)
