"""Tables: numbers side by side that a person may paste into a pull request."""

from __future__ import annotations

from moediag.records import dataclass

# An int is a count, a float a measured number, None is "not measured"; a bool is yes or no.
Cell = str | bool | int | float | None


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are values; each view formats them (:mod:`moediag.report.tables`).

    Ranks, steps and experts are rows, not columns, so that a table of 64 ranks still fits on a
    page. Raises ValueError where a row is not as long as ``columns`` or a cell is no :data:`Cell`.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    """What a reader must know to trust the numbers."""

    def __post_init__(self) -> None:
        if not self.columns:
            raise ValueError(f"table {self.title!r} has no columns")
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r} has {len(self.columns)} columns and a row of {len(row)}"
                )
            for cell in row:
                if not isinstance(cell, Cell):
                    kind = type(cell).__name__
                    raise ValueError(f"table {self.title!r} has a cell of type {kind}")
