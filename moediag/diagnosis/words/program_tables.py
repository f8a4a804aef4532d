"""Merges, over all ranks, the tables that a program measured beside gradients."""

from __future__ import annotations

from moediag.evidence.model import Evidence
from moediag.result import Cell, Table


def tables(evidence: Evidence) -> tuple[Table, ...]:
    """One table per title, in the order of the lowest rank. Rows that several ranks share appear
    once. Rows that begin with a word are sorted by it, because ranks take turns to report them.
    A table without rows is left out."""
    rows: dict[tuple[str, tuple[str, ...]], dict[tuple[Cell, ...], None]] = {}
    notes: dict[str, str] = {}
    for _, seen in sorted(evidence.ranks.items()):
        for table in seen.outcome.tables if seen.outcome is not None else ():
            key = (table.title, tuple(table.columns))
            rows.setdefault(key, {}).update({tuple(row): None for row in table.rows})
            notes.setdefault(table.title, table.note)
    return tuple(
        Table(title, columns, _sorted(tuple(found)), notes[title])
        for (title, columns), found in rows.items()
        if found
    )


def _sorted(rows: tuple[tuple[Cell, ...], ...]) -> tuple[tuple[Cell, ...], ...]:
    if all(isinstance(row[0], str) for row in rows):
        return tuple(sorted(rows, key=lambda row: str(row[0])))
    return rows
