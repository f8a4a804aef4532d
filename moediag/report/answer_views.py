"""Every view of an answer (:mod:`moediag.result.answer_blocks`).

Each begins or ends with the word of the answer's state, which no command can replace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

from moediag.errors import ExitCode
from moediag.report import tables
from moediag.report.printable import printable
from moediag.report.text_layout import Line, indented, labelled
from moediag.result import wording
from moediag.result.answer_blocks import Answer, Bars, Block, Case, Code, Row

LIMIT = 1_000_000  # bytes of markdown; GitHub drops a step summary beyond 1 MiB whole
_CUT = "*Cut at the size limit; --json, --html and --junit have everything.*\n"


def show(
    answer: Answer, report: Path, as_json: bool, no_color: bool, wanted: Mapping[str, Path]
) -> int:
    """Prints the answer, writes the ``wanted`` formats (``html``, ``markdown``, ``junit``) and
    returns the exit code. ``report``: where the files of the command are."""
    from moediag.report import consoles, stderr, stdout, terminal, views

    made = {kind: RENDERERS[kind](answer) for kind in wanted}
    for told in views.write((), wanted, dict, made):
        stderr.line(told)
    if as_json:
        stdout.data(data(answer))
    elif Path("-") not in wanted.values():
        console = consoles.output(no_color)
        width = min(console.width, terminal.WIDEST)
        for line in lines(answer, width):
            terminal.show(line, console)
        for line in labelled("REPORT", str(views.short(report)), width, "faint"):
            terminal.show(line, console)
    return answer.exit_code


def data(answer: Answer) -> object:
    """Returns the object of ``--json``."""
    from moediag.report.json_view import finite

    return finite(answer.to_json())


# -- terminal --------------------------------------------------------------------------


def lines(answer: Answer, width: int) -> Iterator[Line]:
    """Yields the page for a terminal: the most important section and the answer last, in about
    eight lines."""
    for section in reversed(answer.sections):
        blocks = section.blocks if section.brief is None else section.brief
        for block in blocks:
            yield from _block_lines(block, width)
        if blocks:
            yield ()
    yield from labelled(answer.command.upper(), answer.sentence, width, answer.state.style)
    for row in answer.rows:
        yield from _short(row, width)


def _short(row: Row, width: int) -> list[Line]:
    """Returns at most two lines, unless it is what to type."""
    found = list(_block_lines(row, width))
    if len(found) <= 2 or row.label == "NEXT":
        return found
    (text, style) = found[1][-1]
    cut = text[: width - len(found[1][0][0]) - 2].rstrip(" ,;:")
    return [found[0], (*found[1][:-1], (f"{cut} …", style))]


def _block_lines(block: Block, width: int) -> Iterator[Line]:
    if isinstance(block, str):
        yield from indented(block, width, 1)
    elif isinstance(block, Row):
        yield from labelled(block.label, block.text, width, block.style)
    elif isinstance(block, Code):
        yield from (((f" {line}", "plain"),) for line in block.text.splitlines())
    elif not isinstance(block, Bars):
        yield from tables.lines(block, width)


# -- markdown --------------------------------------------------------------------------


def markdown(answer: Answer, limit: int = LIMIT, level: int = 2) -> str:
    """Returns at most ``limit`` bytes, with a note if the end is left out. ``level``: of the first
    heading."""
    head = f"{'#' * level} {wording.inline(answer.title)}\n\n{answer.state.mark} "
    head += f"**{answer.state}**"
    head += f": {wording.inline(answer.conclusion)}\n\n" if answer.conclusion else "\n\n"
    head += "".join(map(_markdown_block, answer.rows)) + "\n" * bool(answer.rows)
    room = limit - len(_CUT.encode())
    out, used = [printable(head)], len(printable(head).encode())
    for part in map(printable, _markdown_parts(answer, level + 1)):
        used += len(part.encode())
        if used > room:
            return "".join([*out, _CUT])
        out.append(part)
    return "".join(out).rstrip("\n") + "\n"


def _markdown_parts(answer: Answer, level: int) -> Iterator[str]:
    """Yields small parts, so that little is left out at the limit."""
    for section in answer.sections:
        if section.title and section.blocks:
            yield f"{'#' * level} {wording.inline(section.title)}\n\n"
        for kind, blocks in _grouped(section.blocks):
            yield from map(_markdown_block, blocks)
            if kind == Row.__name__:
                yield "\n"


def _grouped(blocks: Iterable[Block]) -> Iterator[tuple[str, list[Block]]]:
    """Yields neighbours of the same type, after its name: rows make one list."""
    for kind, alike in groupby(blocks, type):
        yield kind.__name__, list(alike)


def _markdown_block(block: Block) -> str:
    from moediag.report.markdown import fenced

    if isinstance(block, Row):
        head = f"- **{wording.inline(block.label)}**:" if block.label else "  -"
        return f"{head} {wording.inline(block.text)}\n"
    if isinstance(block, Code):
        return fenced(block.text, block.language) + "\n"
    if isinstance(block, Bars):
        return ""
    return f"{wording.inline(block)}\n\n" if isinstance(block, str) else tables.markdown(block)


# -- HTML and JUnit --------------------------------------------------------------------


def html(answer: Answer) -> str:
    """Returns one self-contained page; the template engine escapes every text."""
    from moediag.report.html import template

    whole = _whole(answer)
    return printable(template("answer.html.j2").render(answer=whole, grouped=_grouped))


def _whole(answer: Answer) -> Answer:
    """``answer`` without the row that says how to see the details: a document has them."""
    return replace(answer, rows=tuple(row for row in answer.rows if row.label != "details"))


def junit(answer: Answer) -> str:
    """Returns a suite with one case for the whole answer, then the suites of its cases. No case is
    green that says nothing: inconclusive is an error."""
    from moediag.report.junit import document, suite

    text = "\n".join(f"{row.label}: {row.text}" for row in _whole(answer).rows)
    own = Case(
        answer.command, answer.title, answer.state, answer.conclusion, text, suite=answer.title
    )
    cases = sorted(answer.cases, key=lambda case: case.suite)  # stable
    suites = [
        suite(name, list(map(_case, members)))
        for name, members in groupby((own, *cases), lambda case: case.suite)
    ]
    return document(f"moediag {answer.command}", suites)


def _case(case: Case) -> ElementTree.Element:
    made = ElementTree.Element(
        "testcase", name=printable(case.name), classname=printable(case.group),
        time=f"{case.seconds:.3f}",
    )  # fmt: skip
    if case.state is None:
        ElementTree.SubElement(made, "skipped", message=printable(case.message))
    elif case.state.exit_code:
        found = case.state.exit_code == ExitCode.FAILURE_FOUND
        tag = "failure" if found else "error"
        child = ElementTree.SubElement(
            made, tag, message=printable(case.message), type=str(case.state)
        )
        child.text = printable(case.text)
    return made


RENDERERS: Mapping[str, Callable[[Answer], str]] = {
    "html": html, "markdown": markdown, "junit": junit,
}  # fmt: skip
