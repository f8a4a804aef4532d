"""Builds tables of a whole run: tables that several variants have, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from moediag.lab.judgement import repeats
from moediag.result import Cell, Table, TrialResult, Verdict

_ABOUT_WEIGHTS = (Verdict.WRONG_WEIGHTS,)
_HELD = "Experts held by each rank"
Key = tuple[str, tuple[str, ...]]


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
    rates = repeats.table(trials)
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
