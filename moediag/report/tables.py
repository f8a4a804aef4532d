"""Formats the cells of a :class:`Table`, and the table as text or markdown.

Pure. Numbers are right-aligned, words left-aligned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from moediag.records import dataclass
from moediag.report.text_layout import Line, indented, labelled, wrap
from moediag.result import Cell, Table, TrialResult, wording

MOST_ROWS = 64  # in text; the HTML page and result.json have all
DIGITS = 7  # significant digits, fp32's precision: equal losses look equal and others do not
NOT_NUMBERS = ("nan", "inf", "-inf")  # as text in JSON
GAP = 2
LEAST = 12  # characters; narrower columns break words too often
NARROWEST = 8  # what layout.wrap can fill
INDENT, LITTLE_INDENT = 10, 3


@dataclass(frozen=True, slots=True)
class Grid:
    """A table in words. ``right``: whether each column holds numbers; ``left_out``: number of rows
    omitted from ``rows``."""

    title: str
    header: tuple[str, ...]
    right: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]
    left_out: int
    note: str


def cell(value: Cell) -> str:
    """Returns ``15,696``; ``5.545177`` (seven significant digits, ``1.192093e-07`` for very large
    or small values); ``nan``; ``yes``; ``-`` for what was not measured; text on one line."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value or 0.0:,.{DIGITS}g}"  # not "-0"
    return " ".join(value.split())


def grid(table: Table, most_rows: int | None = None) -> Grid:
    """Returns the table in words. ``most_rows``: None shows all; a single extra row is shown."""
    shown = table.rows
    if most_rows is not None and len(shown) > most_rows + 1:
        shown = shown[:most_rows]
    columns = [_column([row[i] for row in shown]) for i in range(len(table.columns))]
    return Grid(
        title=" ".join(table.title.split()),
        header=tuple(map(cell, table.columns)),
        right=tuple(_numbers([row[i] for row in table.rows]) for i in range(len(table.columns))),
        rows=tuple(zip(*columns, strict=True)),
        left_out=len(table.rows) - len(shown),
        note=table.note,
    )


def _column(values: Sequence[Cell]) -> list[str]:
    """Formats floats with the same number of decimals, up to seven significant digits."""
    texts = [cell(value) for value in values]
    floats = {
        i: value
        for i, value in enumerate(values)
        if isinstance(value, float) and math.isfinite(value) and "e" not in texts[i]
    }
    decimals = max((len(texts[i].partition(".")[2]) for i in floats), default=0)
    for i, value in floats.items():
        exponent = int(f"{value:.{DIGITS - 1}e}".partition("e")[2])
        texts[i] = f"{value or 0.0:,.{min(decimals, DIGITS - 1 - exponent)}f}"
    return texts


def _numbers(column: Sequence[Cell]) -> bool:
    known = [value for value in column if value is not None]
    return bool(known) and all(
        value in NOT_NUMBERS if isinstance(value, str) else not isinstance(value, bool)
        for value in known
    )


def of_repeats(trials: Sequence[TrialResult]) -> tuple[Table, ...]:
    """Returns the tables of equal repeats of one trial. Equal tables appear once; if repeats
    differ, the title of each further one names its repeat."""
    found: dict[Grid, Table] = {}
    for number, trial in enumerate(trials):
        for table in trial.tables:
            title = f"{table.title} (repeat {trial.repeat + 1})" if number else table.title
            found.setdefault(grid(table), replace(table, title=title))
    return tuple(found.values())


# -- text ------------------------------------------------------------------------------


def lines(table: Table, width: int) -> Iterator[Line]:
    """Yields the table below its title, no line longer than ``width`` (from 40 on). Headers wrap
    first, then words; if that is not enough, many short columns are shown in parts beside the first
    one, and each row of others becomes a short list."""
    shown = grid(table, MOST_ROWS)
    yield from labelled("TABLE", shown.title, width)
    indent = INDENT if sum(_natural(shown)) + _gaps(shown) <= width - INDENT else LITTLE_INDENT
    widths = _widths(shown, width - indent)
    parts = _parts(shown, width - indent) if widths is None else []
    if parts:
        for part in parts:
            yield from _gridded(part, _natural(part), indent)
    elif widths is None:
        yield from _listed(shown, width)
    else:
        yield from _gridded(shown, widths, indent)
    if not shown.rows:
        yield from indented("no rows", width, indent, "faint")
    if shown.left_out:
        yield from indented(_left_out(shown), width, indent, "faint")
    if shown.note:
        yield from indented(shown.note, width, indent, "faint")


def _left_out(shown: Grid) -> str:
    return f"and {wording.plural(shown.left_out, 'more row')}; JSON and HTML have all"


def _gridded(shown: Grid, widths: Sequence[int], indent: int) -> Iterator[Line]:
    yield from _row(shown.header, shown.right, widths, indent, "label")
    rule = (" " * GAP).join("-" * width for width in widths)
    yield (" " * indent, "plain"), (rule, "faint")
    for row in shown.rows:
        yield from _row(row, shown.right, widths, indent, "plain")


def _row(
    cells: Sequence[str], right: Sequence[bool], widths: Sequence[int], indent: int, style: str
) -> Iterator[Line]:
    """Yields as many lines as the highest cell needs."""
    parts = [wrap(text, width) for text, width in zip(cells, widths, strict=True)]
    height = max(map(len, parts))
    for part in parts:
        blank = [""] * (height - len(part))
        part[:] = blank + part if style == "label" else part + blank  # headers are bottom-aligned
    for texts in zip(*parts, strict=True):
        line = (" " * GAP).join(
            text.rjust(width) if at_right else text.ljust(width)
            for text, width, at_right in zip(texts, widths, right, strict=True)
        )
        yield (" " * indent, "plain"), (line.rstrip(), style)


def _listed(shown: Grid, width: int) -> Iterator[Line]:
    """Yields column and value, line by line, for a terminal too narrow for the columns."""
    for row in shown.rows:
        for number, (head, text) in enumerate(zip(shown.header, row, strict=True)):
            indent = LITTLE_INDENT if number == 0 else 2 * LITTLE_INDENT
            yield from indented(f"{head}: {text}", width, indent, "plain" if number else "label")


def _parts(shown: Grid, room: int) -> list[Grid]:
    """Returns the columns in parts that fit, each behind the first column; [] unless a part has
    three more columns on average."""
    first, *sizes = _natural(shown)
    parts: list[list[int]] = []
    used = room
    for column, size in enumerate(sizes, start=1):
        used += GAP + size
        if used > room:
            parts.append([0])
            used = first + GAP + size
        if used > room:
            return []
        parts[-1].append(column)
    return [_of(shown, part) for part in parts] if 3 * len(parts) <= len(sizes) else []


def _of(shown: Grid, columns: Sequence[int]) -> Grid:
    """Returns the grid of these columns."""
    return replace(
        shown,
        header=tuple(shown.header[i] for i in columns),
        right=tuple(shown.right[i] for i in columns),
        rows=tuple(tuple(row[i] for i in columns) for row in shown.rows),
    )


def _natural(shown: Grid) -> list[int]:
    return [max(map(len, column)) for column in zip(shown.header, *shown.rows, strict=True)]


def _gaps(shown: Grid) -> int:
    return GAP * (len(shown.header) - 1)


def _widths(shown: Grid, room: int) -> list[int] | None:
    """Returns the column widths, ``room`` in all with the gaps; None if that is too little."""
    room -= _gaps(shown)
    natural = _natural(shown)
    widths = [min(size, max(room, 1)) for size in natural]
    cells = [max(map(len, column), default=0) for column in zip(*shown.rows, strict=True)]
    cells = cells or [0] * len(natural)
    short_header, short_words = [], []
    for head, size, whole, number in zip(shown.header, cells, natural, shown.right, strict=True):
        word = max(map(len, head.split()), default=0)
        least = min(whole, NARROWEST)
        short_header.append(max(size, word, least))
        short_words.append(max(size, min(word, LEAST), least) if number else min(whole, LEAST))
    for floor in (short_header, short_words):
        while sum(widths) > room:
            wide = [i for i, size in enumerate(widths) if size > floor[i]]
            if not wide:
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
    return widths if sum(widths) <= room else None


# -- markdown --------------------------------------------------------------------------


def markdown(table: Table) -> str:
    """Returns a GitHub markdown table below its title, if any; ends in an empty line."""
    shown = grid(table, MOST_ROWS)
    out = [f"**{wording.inline(shown.title)}**", ""] if shown.title else []
    out += [_markdown_row(shown.header)]
    out.append("|" + "|".join("---:" if number else "---" for number in shown.right) + "|")
    out += [_markdown_row(row) for row in shown.rows]
    if shown.left_out:
        out += ["", f"*{_left_out(shown)}*"]
    if shown.note:
        out += ["", wording.inline(shown.note)]
    return "\n".join([*out, "", ""])


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(wording.inline, cells)) + " |"
