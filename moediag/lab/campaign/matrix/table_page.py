"""The page of a matrix, and its JSON. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from packaging.version import Version

from moediag.lab.campaign.matrix.cells import COULD_NOT_RUN, Cell, Matrix
from moediag.result import Table, Verdict, wording
from moediag.result.answer_blocks import Answer, AnswerState, Case, Row, Section

SCHEMA_VERSION = 1
_SHOWN = 200  # characters of a reason


def to_json(matrix: Matrix) -> dict[str, Any]:
    cells = sorted(matrix.cells.values(), key=lambda c: (Version(c.version), c.subject))
    return {
        "schema_version": SCHEMA_VERSION,
        "package": matrix.package,
        "subjects": list(matrix.subjects),
        "versions": list(matrix.versions),
        "looked_for": {k: list(v) for k, v in matrix.looked_for.items()},
        "cells": [dataclasses.asdict(cell) for cell in cells],
        "stretches": {s: [list(ends) for ends in matrix.stretches(s)] for s in matrix.subjects},
        "missing": matrix.missing,
    }


def answer(matrix: Matrix, incomplete: str = "") -> Answer:
    scenarios = dict.fromkeys(subject.split(" ")[0] for subject in matrix.subjects)
    title = f"{', '.join(scenarios)} by release of {matrix.package}"
    head = (matrix.package, *heads(matrix))
    table = Table(f"releases of {matrix.package}", head, tuple(map(tuple, rows(matrix))))
    marks = "; ".join(f"{mark} {meaning}" for mark, meaning in legend(matrix))
    shown = sum(bool(matrix.stretches(subject)) for subject in matrix.subjects)
    where = Table("where the failure shows", ("", "releases"), tuple(found(matrix)))
    columns = wording.plural(len(matrix.subjects), "column")
    told = (f"the failure shows in {shown} of {columns}; {counted(matrix)}", incomplete)
    return Answer(
        "matrix",
        title,
        AnswerState.of(False, incomplete or doubtful(matrix), AnswerState.ANSWERED),
        "; ".join(filter(None, told)),
        (
            Section((where, *(Row("NOTE", text, "doubt") for text in remarks(matrix)))),
            Section((table, Row("MARKS", marks))),
        ),
        tuple(_rows_of_answer(matrix, incomplete)),
        cases=tuple(map(_case, matrix.cells.values())),
        facts=to_json(matrix),
    )


def _rows_of_answer(matrix: Matrix, incomplete: str) -> Iterator[Row]:
    """Yields the first column that fails, the first doubt, and what to type."""
    failing = [subject for subject in matrix.subjects if matrix.stretches(subject)]
    if failing:
        subject, more = failing[0], len(failing) - 1
        verdicts = " or ".join(matrix.looked_for.get(subject, ())) or "fails"
        others = f" (and {wording.plural(more, 'more column')})" if more else ""
        yield Row("WHAT", f"{subject}: {verdicts}{others}")
        where = dict(zip(matrix.subjects, found(matrix), strict=True))
        yield Row("WHERE", f"{matrix.package} {where[subject][1]}")
    told = [incomplete] if incomplete else remarks(matrix)
    if told:
        more = len(told) - 1
        others = f" (and {wording.plural(more, 'more note')})" if more else ""
        yield Row("WHY", f"not known: {told[0]}{others}", "doubt")
    if failing:
        yield Row("NEXT", _bisect(matrix, failing[0]))


def _bisect(matrix: Matrix, subject: str) -> str:
    """Returns the command that finds where the failure began, beside the oldest failing row."""
    first = matrix.stretches(subject)[0][0]
    older = matrix.versions[: matrix.versions.index(first)]
    good = [v for v in older if matrix.mark(subject, v) == "."]
    scenario, _, family = subject.partition(" ")
    since = f" --good {good[-1]}" if good else ""
    model = f" --set model.family={family}" if family else ""
    return f"moediag bisect {scenario} --package {matrix.package}{since} --bad {first}{model}"


def doubtful(matrix: Matrix) -> bool:
    """Whether something could not be found out."""
    return any(c.status is None for c in matrix.unsettled())


def counted(matrix: Matrix) -> str:
    """Returns ``61 runs, 3 places without any``."""
    missing = f", {wording.plural(matrix.missing, 'place')} without any" * bool(matrix.missing)
    return wording.plural(len(matrix.cells), "run") + missing


def _case(cell: Cell) -> Case:
    state = AnswerState.of(False, cell.status is None, AnswerState.ANSWERED)
    applies = cell.verdict != Verdict.NOT_APPLICABLE
    return Case(
        cell.version, cell.subject, state if applies else None, _why(cell),
        seconds=cell.seconds or 0.0, suite=cell.subject,
    )  # fmt: skip


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
    """Returns unknown results and other failures, grouped."""
    alike: dict[tuple[str, str], list[str]] = {}
    for cell in matrix.unsettled():
        alike.setdefault((cell.subject, _why(cell)), []).append(cell.version)
    return [f"{', '.join(versions)}, {subject}: {why}" for (subject, why), versions in
            alike.items()]  # fmt: skip


def _why(cell: Cell) -> str:
    text = cell.text if len(cell.text) <= _SHOWN else cell.text[: _SHOWN - 1] + "…"
    if cell.verdict == COULD_NOT_RUN:
        return text if text.startswith("not ") else f"could not be run: {text}"
    # The signature of a failure begins with its verdict.
    return text if text.startswith(cell.verdict) else f"{cell.verdict} ({text})"
