"""The page in a terminal: who diverged, where, why, which fix is correct and what it costs.

``lines`` lays a :class:`Page` out for a width; only ``render`` prints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from moediag.report import tables
from moediag.report.excerpt import excerpt_lines
from moediag.report.finding import Finding, Side, StackGroup
from moediag.report.page import ClaimRow, ControlRow, FixRow, Page, page_of
from moediag.report.printable import printable
from moediag.report.text_layout import (
    Line,
    at_right,
    columns,
    flow,
    indented,
    labelled,
    plain,
    to_type,
    wrap,
)
from moediag.result import FAILURES, Effect, RunResult, Table, Verdict

STYLES = {
    "label": "bold",
    "bad": "bold red",
    "good": "green",
    "doubt": "yellow",
    "faint": "dim",
    "plain": "",
}
WIDEST = 120  # longer lines are harder to read than to wrap
MOST_NAMES = 6
MOST_PLACES = 3
_FUNCTION = re.compile(r"(\.py:\d+) [\w.<>]+")
MOST_ANSWERED = 2  # places in the answer at the end
MOST_LINES = 8  # of that answer
SHORT = 24  # lines of a small terminal: the answer of a longer page is repeated at its end
_SENTENCE = re.compile(r"(?<=[a-z0-9)`]\.) (?=[A-Z])")


def render(
    result: RunResult,
    console: Console,
    run_folder: Path | None = None,
    details: bool = False,
    answer: bool = True,
) -> None:
    """Prints the page of ``result``. ``run_folder``: location of the evidence, for the page.
    ``details``: schedules and stacks also where an excerpt of the source shows the cause.
    ``answer``: a long page ends with its answer; False if :func:`closing` follows later."""
    width, height = min(console.width, WIDEST), console.height if console.is_terminal else SHORT
    for line in lines(page_of(result), width, run_folder, details, answer, height):
        show(line, console)


def show(line: Line, console: Console) -> None:
    """Prints one line in its styles, without wrapping, truncating or interpreting markup."""
    text = Text.assemble(*((printable(piece), STYLES[style]) for piece, style in line))
    text.rstrip()
    console.print(text, no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)


def as_text(page: Page, width: int = 100, run_folder: Path | None = None) -> str:
    """Returns the same page without styles, for a file or a log."""
    return "\n".join(plain(line) for line in lines(page, width, run_folder)) + "\n"


def lines(
    page: Page,
    width: int,
    run_folder: Path | None = None,
    details: bool = False,
    answer: bool = True,
    height: int = SHORT,
) -> Iterator[Line]:
    """Yields the whole page, no line longer than ``width`` (from 40 on). One that does not fit
    into ``height`` lines, with a prompt below it, ends with its answer."""
    head = list(_findings(page, width, run_folder, details))
    last = list(_commands(page, width, run_folder, details))
    yield from head
    if len(head) + len(last) >= height and answer and len(page.findings) == 1:
        yield from answer_lines(page.findings[0], width)
    yield from last


def _findings(page: Page, width: int, run_folder: Path | None, details: bool) -> Iterator[Line]:
    """What was found, and the conclusion."""
    for finding in page.findings:
        yield from finding_lines(finding, width, run_folder, details)
        yield ()
    if not page.findings:
        title = list(flow([(page.scenario, "label")], width))
        yield from at_right(title, page.state, page.state.style, width)
    for finding in page.tabled:
        yield from _title(finding, width)
        yield from _tables(finding.tables, width)
        yield ()
    for table in page.tables:
        yield from tables.lines(table, width)
        yield ()
    yield from _claims(page.claims, width)
    yield from _fixes(page.fixes, width)
    yield from _controls(page, width)
    for number, text in enumerate(page.not_seen):
        yield from labelled("NOT SEEN" if number == 0 else "", text, width, "faint")
    yield from labelled("RESULT", " · ".join(page.conclusion), width, page.state.style)
    if page.overrides:
        yield from labelled("WITH", " ".join(page.overrides), width)


def _commands(page: Page, width: int, run_folder: Path | None, details: bool) -> Iterator[Line]:
    """What to type for more."""
    if run_folder is not None:
        if not page.findings:
            yield from labelled("EVIDENCE", str(run_folder), width, "faint")
        if any(finding.excerpt for finding in page.findings) and not details:
            yield from to_type("DETAILS", f"moediag report {run_folder} --details", width)
        yield from to_type("HTML", f"moediag report {run_folder} --html page.html", width)
    if page.explain:
        yield from to_type("MEANING", f"moediag explain {page.explain}", width)


def finding_lines(
    finding: Finding, width: int, run_folder: Path | None, details: bool = True
) -> Iterator[Line]:
    """Yields one finding in full; without ``details`` no schedules and stacks where an excerpt of
    the source shows the cause."""
    found = finding.found
    yield from _title(finding, width)
    if finding.remark:
        yield from indented(finding.remark, width, 1, "doubt")
    yield from flow(((text, _blame_style(text)) for text in finding.blame), width)
    yield from excerpt_lines(finding.excerpt, width)
    if not finding.excerpt or details:
        yield from _where(finding, width)
    if found.next_step:
        yield from labelled("NEXT", found.next_step, width, "label")
    if found.cause:
        yield from labelled("CAUSE", found.cause, width)
    for text in found.suspicious:
        yield from labelled("SUSPECT", text, width, "doubt")
    if not finding.excerpt or details:
        yield from _evidence_lines(finding, width)
    yield from _tables(finding.tables, width)
    for text in found.notes:
        yield from labelled("NOTE", text, width)
    if finding.timing:
        yield from labelled("TIME", finding.timing, width, "faint")
    for number, text in enumerate(found.not_seen):
        yield from labelled("NOT SEEN" if number == 0 else "", text, width, "faint")
    if found.attached:
        titles = ", ".join(title for title in found.attached)
        yield from labelled("ATTACHED", f"{titles} (--html shows it)", width, "faint")
    if finding.evidence:
        where = finding.evidence if run_folder is None else str(run_folder / finding.evidence)
        yield from labelled("EVIDENCE", where, width, "faint")


def _where(finding: Finding, width: int) -> Iterator[Line]:
    for number, text in enumerate(_some(finding.places, MOST_PLACES, "place")):
        yield from labelled("WHERE" if number == 0 else "", text, width)


def _evidence_lines(finding: Finding, width: int) -> Iterator[Line]:
    """What the ranks' schedules, gradients and stacks show."""
    if finding.divergence:
        yield from labelled("FIRST DIVERGENCE", finding.divergence, width)
        yield from _sides(finding.sides, width)
    if finding.gradients:
        yield from labelled("GRADIENTS", finding.gradients, width)
        for name in _some(finding.wrong_parameters, MOST_NAMES, "name"):
            yield from indented(name, width, 12)
    for number, group in enumerate(finding.stacks):
        yield from _stack(group, "STACKS" if number == 0 else "", width)


def answer_lines(finding: Finding, width: int, room: int = MOST_LINES) -> Iterator[Line]:
    """The verdict, who, where, the cause and the next step, for the end of a long page: at most
    ``room`` lines, as far as the texts allow. Where an excerpt of the source shows the cause, it
    is repeated only if there is room."""
    found = finding.found
    blame = ((text, _blame_style(text)) for text in finding.blame)
    head = list(flow(((found.verdict, verdict_style(found.verdict)), *blame), width))
    for number, text in enumerate(_some(finding.places, MOST_ANSWERED, "place")):
        head += labelled("WHERE" if number == 0 else "", _shortened(text, width), width)
    tail: list[Line] = []
    for text in found.suspicious[:MOST_ANSWERED]:
        tail += labelled("SUSPECT", text, width, "doubt")
    if found.next_step:
        tail += labelled("NEXT", found.next_step, width, "label")
    yield from head
    for count in (2, 1) if found.cause else ():
        cause = list(labelled("CAUSE", " ".join(_SENTENCE.split(found.cause)[:count]), width))
        fits = len(head) + len(cause) + len(tail) <= room
        if fits or (count == 1 and not finding.excerpt):
            yield from cause
            break
    yield from tail


def closing(result: RunResult, width: int, run_folder: Path) -> Iterator[Line]:
    """The answer again, for the end of a job's output: the launcher's own last words, such as a
    traceback of torchrun, stand between the page and the prompt."""
    findings = page_of(result).findings
    if findings:
        again = list(to_type("AGAIN", f"moediag report {run_folder}", width))
        yield from answer_lines(findings[-1], width, MOST_LINES - len(again))
        yield from again
    else:
        if step := result.trials[-1].diagnosis.next_step:
            yield from labelled("NEXT", step, width, "label")
        yield ((f"moediag: evidence in {run_folder}", "plain"),)


def short(result: RunResult) -> str:
    """Returns the answer as plain text without line breaks in a sentence, for a chat."""
    page = page_of(result)
    found = [answer_lines(finding, 10_000) for finding in page.findings]
    told = [plain(line).strip() for lines in found for line in lines]
    if not told:
        told = [f"{page.state}: {' · '.join(page.conclusion)}"]
    return "\n".join([" ".join([result.scenario, *result.overrides]), *told]) + "\n"


def _shortened(text: str, width: int) -> str:
    """``text`` on one line, rather without the names of functions than without its end."""
    room = width - 10
    if len(text) > room:
        text = _FUNCTION.sub(r"\1", text)
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _title(finding: Finding, width: int) -> Iterator[Line]:
    pieces = [(piece, "label" if i < 2 else "plain") for i, piece in enumerate(finding.title)]
    style = verdict_style(finding.found.verdict)
    yield from at_right(list(flow(pieces, width, " · ")), finding.found.verdict, style, width)


def _tables(shown: Sequence[Table], width: int) -> Iterator[Line]:
    for table in shown:
        yield from tables.lines(table, width)


def verdict_style(verdict: str) -> str:
    if verdict == Verdict.CLEAN:
        return "good"
    return "bad" if verdict in FAILURES else "doubt"


def _blame_style(text: str) -> str:
    if text.startswith("CULPRIT"):
        return "bad"
    return "doubt" if text.startswith("VICTIM") else "plain"


def _sides(sides: Sequence[Side], width: int) -> Iterator[Line]:
    same_dtype = len({side.dtype for side in sides}) == 1
    rows = columns(
        [[s.ranks, s.op, s.elements + ("" if same_dtype else f" {s.dtype}")] for s in sides]
    )
    for side, row in zip(sides, rows, strict=True):
        head = "   " + "  ".join(row)
        if not side.missing:
            yield from _whole_or_wrapped(head, width)
            continue
        missing = list(_some(side.missing, MOST_NAMES, "name"))
        if len(missing) == 1 and len(head) + len("   missing: ") + len(missing[0]) <= width:
            yield (head, "plain"), (f"   missing: {missing[0]}", "bad")
            continue
        yield from _whole_or_wrapped(head, width)
        yield ((" " * 12 + "missing:", "bad"),)
        for name in missing:
            yield from indented(name, width, 14, "bad")


def _whole_or_wrapped(text: str, width: int) -> Iterator[Line]:
    """Yields the text with its column spacing if it fits, else wrapped."""
    if len(text) <= width:
        yield ((text, "plain"),)
    else:
        yield from indented(text, width, 3)


def _some(texts: Sequence[str], most: int, noun: str) -> Iterator[str]:
    """Yields the first ``most``, then how many more there are (a single extra one is shown)."""
    most = most if len(texts) > most + 1 else len(texts)
    yield from texts[:most]
    if len(texts) > most:
        yield f"and {len(texts) - most} more {noun}s"


def _stack(group: StackGroup, label: str, width: int) -> Iterator[Line]:
    yield from labelled(label, f"{group.ranks}, innermost frame first", width)
    if not group.frames:
        yield from indented("no frame was seen", width, 12, "faint")
    for frame in group.frames:
        yield from indented(frame, width, 12)


def _claims(rows: Sequence[ClaimRow], width: int) -> Iterator[Line]:
    for number, row in enumerate(rows):
        text = f"{row.variant}  {row.judgement}"
        style = {"reproduced": "bad", "not reproduced": "good"}.get(row.judgement, "doubt")
        yield from labelled("CLAIMS" if number == 0 else "", text, width, style)
        if row.what:
            yield from indented(row.what, width, 14)


def _fixes(rows: Sequence[FixRow], width: int) -> Iterator[Line]:
    if not rows:
        return
    cells = columns([[row.variant, _judgement(row), row.cost, ""] for row in rows])
    for number, (row, padded) in enumerate(zip(rows, cells, strict=True)):
        head = (" FIXES".ljust(10) if number == 0 else " " * 10, "label")
        variant, judgement, cost, _ = padded
        style = judgement_style(row.judgement)
        used = 10 + len(variant) + len(judgement) + len(cost) + 6
        marker = "<- cheapest correct" if row.cheapest else ""
        line: Line = (head, (variant, "plain"), ("  ", "plain"), (judgement, style))
        line = (*line, ("  " + cost, "plain"))
        below = row.remark
        if used - 2 > width:  # too narrow for columns
            for part, name in enumerate(wrap(row.variant, width - 10)):
                yield head if part == 0 else (" " * 10, "plain"), (name, "plain")
            text = "  ".join(filter(None, (_judgement(row), row.cost)))
            yield from indented(text, width, 14, style)
            below = "; ".join(filter(None, (marker, below)))
        elif used + len(marker or below) <= width:
            yield (*line, ("  " + (marker or below), "label" if marker else "plain"))
            below = below if marker else ""
        else:
            yield line
            below = "; ".join(filter(None, (marker, below)))
        if below:
            yield from indented(below, width, 14)
        for note in filter(None, (row.what, *row.notes)):
            yield from indented(note, width, 14, "faint")
    if any(row.cost for row in rows):
        text = "x: step time relative to the healthy unfixed step [quartiles of the rounds]"
        yield from indented(text, width, 10, "faint")


def judgement_style(judgement: str) -> str:
    if judgement == "correct":
        return "good"
    return "bad" if judgement in tuple(Effect) else "doubt"


def _judgement(row: FixRow) -> str:
    plain_words = row.verdict in (Verdict.CLEAN, Verdict.NOT_APPLICABLE)
    return row.judgement if plain_words else f"{row.judgement}: {row.verdict}"


def _controls(page: Page, width: int) -> Iterator[Line]:
    if not page.controls:
        return
    pieces = [
        (f"{c.variant} {c.verdict}" + (" (FAILED)" if c.failed else ""), _control_style(c))
        for c in page.controls
    ]
    for number, line in enumerate(flow(pieces, width, " · ", indent=10)):
        head = (" CONTROLS".ljust(10), "label") if number == 0 else (" " * 10, "plain")
        yield head, *line[1:]


def _control_style(row: ControlRow) -> str:
    if row.failed:
        return "bad"
    return "good" if row.verdict == Verdict.CLEAN else "doubt"
