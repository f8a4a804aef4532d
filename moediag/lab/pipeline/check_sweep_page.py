"""The page of a sweep: one table of all layouts, the best first, and what fails in which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moediag.lab.pipeline.check_fit import GIB
from moediag.lab.pipeline.check_page import question
from moediag.lab.pipeline.check_sweep import SweepResult, Swept, Word, to_json
from moediag.result import Table, wording
from moediag.result.answer_blocks import Answer, Bars, Case, Row, Section
from moediag.result.table import Cell

_BRIEF = 12  # layouts on a terminal
_NAMED = 3  # layouts named beside a finding
_STYLES = {Word.FAILS: "bad", Word.NO: "bad", Word.UNDECIDED: "doubt"}


def answer(result: SweepResult, details: bool = True) -> Answer:
    """``details``: a terminal shows every layout and finding."""
    rows = result.rows
    found = list(_found(rows))
    short = None if details else tuple(found[:2])
    table = None if details else (_table(result, rows[:_BRIEF]),)
    more = [Row("details", f"all {len(rows)} layouts: --details, --html FILE", "faint")]
    return Answer(
        "check",
        f"{result.first.checked.model or result.first.config}: {result.sweep}",
        result.state,
        _conclusion(result),
        (
            Section((_table(result, rows), *_picture(result)), "Layouts", brief=table),
            Section(tuple(found), "What was found", brief=short),
            Section(tuple(question(result.first, layout=False)), "What was asked"),
        ),
        rows=(*_best(rows), *(more if not details and len(rows) > _BRIEF else ())),
        cases=tuple(
            Case(row.name, "layouts", None, f"{row.word}{_reason(row)}", suite="sweep")
            for row in rows
        ),
        facts=to_json(result),
    )  # fmt: skip


def _conclusion(result: SweepResult) -> str:
    words = [row.word for row in result.rows]
    counts = ", ".join(f"{words.count(word)} {word}" for word in Word if word in words)
    return f"{wording.plural(len(words), 'layout')} in {wording.seconds(result.took)}: {counts}"


def _best(rows: Sequence[Swept]) -> Iterator[Row]:
    best = rows[0]
    if not best.good:
        return
    parts = [f"a rank holds {best.peak / GIB:.1f} GiB"] if best.peak is not None else []
    parts += [f"sends {best.sent / 1e9:.1f} GB a step"] if best.sent is not None else []
    parts += [f"{best.seconds:.2g} s on the wires"] if best.seconds is not None else []
    yield Row("best", f"--layout {best.name}: {', '.join(parts)}", "good")


def _table(result: SweepResult, rows: Sequence[Swept]) -> Table:
    wires = any(row.seconds is not None for row in result.rows)
    head = (
        "layout",
        "ranks",
        "",
        "peak GiB",
        "sends GB",
        *(["wires s"] if wires else []),
        "findings",
    )
    order = "seconds on the wires" if wires else "peak"
    note = f"Sorted by what they are, then by {order}. Peak and bytes are those of one rank."
    return Table("layouts", head, tuple(_cells(row, wires) for row in rows), note)


def _picture(result: SweepResult) -> Iterator[Bars]:
    """Yields the peaks of the layouts in the order of the table, and the card."""
    fit = result.first.fit
    bars = tuple(
        (row.name, row.peak / GIB, _STYLES.get(row.word, "good"))
        for row in result.rows if row.peak is not None
    )  # fmt: skip
    card = fit.capacity / GIB if fit is not None else 0.0
    if bars:
        yield Bars("peak of a rank in GiB" + (", and the card" if card else ""), bars, card)


def _cells(row: Swept, wires: bool) -> tuple[Cell, ...]:
    counts = [f"{len(texts)} {level}" for level, texts in
              (("FAILS", row.fails), ("MAY FAIL", row.may_fail)) if texts]  # fmt: skip
    seconds = "" if row.seconds is None else f"{row.seconds:.2g}"
    return (
        row.name, row.ranks, str(row.word),
        "" if row.peak is None else f"{row.peak / GIB:.1f}",
        "" if row.sent is None else f"{row.sent / 1e9:.1f}",
        *([seconds] if wires else []), ", ".join(counts),
    )  # fmt: skip


def _reason(row: Swept) -> str:
    text = next(iter(row.fails), row.undecided)
    return f": {text}" if text else ""


def _found(rows: Sequence[Swept]) -> Iterator[Row]:
    """Yields each finding once, with the layouts that have it."""
    for label, style, texts in (
        ("FAILS", "bad", [row.fails for row in rows]),
        ("NOT SEEN", "doubt", [(row.undecided,) if row.undecided else () for row in rows]),
        ("MAY FAIL", "doubt", [row.may_fail for row in rows]),
    ):
        places: dict[str, list[str]] = {}
        for row, own in zip(rows, texts, strict=True):
            for text in own:
                places.setdefault(text, []).append(row.name)
        for text, names in places.items():
            many = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            where = "every layout" if len(names) == len(rows) else "; ".join(names[:_NAMED]) + many
            yield Row(label, f"{where}: {text}", style)
