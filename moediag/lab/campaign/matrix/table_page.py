"""A matrix as lines, as JSON and as markdown. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from packaging.version import Version

from moediag.lab.campaign.matrix.cells import COULD_NOT_RUN, Cell, Matrix
from moediag.report.text_layout import Line, columns, labelled
from moediag.result import wording

SCHEMA_VERSION = 1
_SHOWN = 200  # characters of a reason
_BEGIN = "<!-- moediag matrix: {} -->"


def to_json(matrix: Matrix) -> dict[str, Any]:
    cells = sorted(matrix.cells.values(), key=lambda c: (Version(c.version), c.subject))
    return {
        "schema_version": SCHEMA_VERSION,
        "package": matrix.package,
        "subjects": list(matrix.subjects),
        "versions": list(matrix.versions),
        "looked_for": {k: list(v) for k, v in matrix.looked_for.items()},
        "cells": [cell.to_json() for cell in cells],
        "stretches": {s: [list(ends) for ends in matrix.stretches(s)] for s in matrix.subjects},
        "missing": matrix.missing,
    }


# ------------------------------------------------------------------------ words


def heads(matrix: Matrix) -> list[str]:
    """Returns the column heads without what all subjects share."""
    parts = [subject.split(" ") for subject in matrix.subjects]
    scenarios, families = {p[0] for p in parts}, {p[-1] for p in parts}
    if len(scenarios) == 1:
        return [p[-1] for p in parts]
    return [p[0] for p in parts] if len(families) == 1 else list(matrix.subjects)


def rows(matrix: Matrix) -> list[list[str]]:
    return [
        [version, *(matrix.mark(subject, version) for subject in matrix.subjects)]
        for version in matrix.versions
    ]


def found(matrix: Matrix) -> Iterator[tuple[str, str]]:
    """Yields (column, where the failure shows), with the number of tried releases."""
    for head, subject in zip(heads(matrix), matrix.subjects, strict=True):
        stretches = matrix.stretches(subject)
        known = (matrix.cells.get((subject, version)) for version in matrix.versions)
        tried = [cell for cell in known if cell is not None and cell.status]
        if not tried:
            yield head, "nothing is known"
        elif not stretches:
            yield head, f"in none of {wording.plural(len(tried), 'release')}"
        else:
            yield head, ", ".join(_stretch(matrix, ends) for ends in stretches)


def _stretch(matrix: Matrix, ends: tuple[str, str]) -> str:
    first, last = ends
    text = first if first == last else f"{first} to {last}"
    sides = [*_open(matrix, first, -1), *_open(matrix, last, 1)]
    return f"{text} ({', '.join(sides)})" if sides else text


def _open(matrix: Matrix, end: str, step: int) -> Iterator[str]:
    """Yields untried releases between this end and the next row."""
    place = matrix.versions.index(end) + step
    if not 0 <= place < len(matrix.versions):
        return
    low, high = sorted((Version(end), Version(matrix.versions[place])))
    between = [v for v in matrix.listed if low < Version(v) < high]
    if between:
        side = "after" if step > 0 else "before"
        yield f"{wording.plural(len(between), 'release')} {side} it not tried"


def legend(matrix: Matrix) -> list[tuple[str, str]]:
    """Returns (mark, meaning) of the marks that occur."""
    used = {word for row in rows(matrix) for cell in row[1:] for word in cell.split()}
    known = [
        ("x", f"the failure shows ({_declared(matrix)})", "x" in used),
        (".", "clean, beside a clean control", "." in used),
        ("blank", "the release lacks it", any("" in row for row in rows(matrix))),
        ("~", "it ran, and nothing can be said: a control failed, or it could not be judged",
         "~" in used),
        ("!", "it could not be run", "!" in used),
        ("?", "was not run", "?" in used),
    ]  # fmt: skip
    return [(mark, meaning) for mark, meaning, there in known if there]


def _declared(matrix: Matrix) -> str:
    """Returns the declared failures, once or by scenario."""
    told = {
        subject.split(" ")[0]: " or ".join(verdicts)
        for subject, verdicts in matrix.looked_for.items()
    }
    if len(set(told.values())) > 1:
        return ", ".join(f"{name} {text}" for name, text in told.items())
    return next(iter(told.values()), "as declared")


def remarks(matrix: Matrix) -> list[str]:
    """Returns every disagreement, then unknown results and other failures, grouped."""
    alike: dict[tuple[str, str], list[str]] = {}
    for cell in matrix.unsettled():
        alike.setdefault((cell.subject, _why(cell)), []).append(cell.version)
    return [f"{', '.join(versions)}, {subject}: {why}" for (subject, why), versions in
            alike.items()]  # fmt: skip


def _why(cell: Cell) -> str:
    text = cell.text if len(cell.text) <= _SHOWN else cell.text[: _SHOWN - 1] + "…"
    if cell.verdict == COULD_NOT_RUN:
        return f"could not be run: {text}"
    # The signature of a failure begins with its verdict.
    return text if text.startswith(cell.verdict) else f"{cell.verdict} ({text})"


# ------------------------------------------------------------------------ layouts


def lines(matrix: Matrix, width: int) -> Iterator[Line]:
    """Yields the table, in as many parts as its columns need, and its findings."""
    head, body = heads(matrix), rows(matrix)
    for first, last in _parts(head, body, width):
        cells = columns([["", *head[first:last], ""], *([r[0], *r[first + 1 : last + 1], ""]
                                                        for r in body)])  # fmt: skip
        for number, row in enumerate(cells):
            yield ((" " + "  ".join(row).rstrip(), "plain" if number else "label"),)
        yield ()
    longest = max(map(len, head), default=0)
    for column, text in found(matrix):
        yield from labelled(column.ljust(longest), text, width)
    for text in remarks(matrix):
        yield from labelled("NOTE", text, width, "doubt")
    told = "; ".join(f"{mark} {meaning}" for mark, meaning in legend(matrix))
    yield from labelled("MARKS", told, width)


def _parts(
    head: Sequence[str], body: Sequence[Sequence[str]], width: int
) -> Iterator[tuple[int, int]]:
    """Returns (first, last) columns that fit beside the releases, at least one each."""
    sizes = [
        max(len(name), *(len(row[place + 1]) for row in body)) + 2
        for place, name in enumerate(head)
    ]
    room = width - max(len(row[0]) for row in body) - 1
    first = used = 0
    for place, size in enumerate(sizes):
        if place > first and used + size > room:
            yield first, place
            first, used = place, 0
        used += size
    yield first, len(head)


def markdown(matrix: Matrix, made: Sequence[str] = ()) -> str:
    """Returns the page. ``made``: markdown lines under the title: command, date, place."""
    head = [matrix.package, *heads(matrix)]
    table = [head, ["---"] * len(head), *rows(matrix)]
    scenarios = dict.fromkeys(subject.split(" ")[0] for subject in matrix.subjects)
    parts = [
        f"## {', '.join(scenarios)} by release of {matrix.package}",
        "",
        *itertools.chain.from_iterable((line, "") for line in made),
        *("| " + " | ".join(row) + " |" for row in table),
        "",
        "Marks: " + "; ".join(f"`{m}` {t}" if m != "blank" else f"{m} {t}"
                              for m, t in legend(matrix)) + ".",
        "",
        *(f"- **{column}**: {text}" for column, text in found(matrix)),
        "",
        *(f"- {text}" for text in remarks(matrix)),
    ]  # fmt: skip
    return "\n".join(parts).rstrip() + "\n"


def placed(old: str, name: str, section: str) -> str:
    """Returns the page with ``section`` instead of the one of the same ``name``."""
    begin = _BEGIN.format(name)
    before, mark, rest = old.partition(begin)
    following = rest.find(_BEGIN.split("{")[0]) if mark else -1
    after = rest[following:] if following >= 0 else ""
    gap = "\n" if before and not before.endswith("\n\n") else ""
    return f"{before}{gap}{begin}\n{section}" + (f"\n{after}" if after else "")
