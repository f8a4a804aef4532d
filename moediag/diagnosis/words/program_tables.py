"""What a program measured beside gradients: its tables, put together from all ranks."""

from __future__ import annotations

from moediag.evidence.model import Evidence
from moediag.result import Cell, Table


def tables(evidence: Evidence) -> tuple[Table, ...]:
    """One per title, in the order in which the lowest rank has them. Rows that several ranks have
    alike are said once; where they begin with a word they are sorted by it, because ranks share
    them in turn. A table without rows is left out."""
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
