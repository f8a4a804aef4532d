"""Lines of a text report: wrapping that respects parameter names, hanging indents, columns.

Pure: a line is a sequence of (text, style) pieces. Each view maps the styles (``label``, ``bad``,
``good``, ``doubt``, ``faint``, ``plain``) to its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from moediag.report.printable import printable

Piece = tuple[str, str]
Line = tuple[Piece, ...]


def wrap(text: str, width: int) -> list[str]:
    """Wraps words to lines of at most ``width`` characters; never empty.

    A word longer than a line (a parameter's name) is broken after a dot, a slash or a comma if it
    has one, else anywhere.
    """
    width = max(width, 8)
    lines, line = [], ""
    for word in text.split():
        for part in _parts(word, width):
            glue = " " if line and part.start else ""
            if line and len(line) + len(glue) + len(part) > width:
                lines.append(line)
                line, glue = "", ""
            line += glue + str(part)
    return [*lines, line] if line or not lines else lines


class _Part(str):
    """A part of a word; ``start`` is False for the continuation of a broken word."""

    __slots__ = ("start",)
    start: bool


def _parts(word: str, width: int) -> Iterator[_Part]:
    start = True
    while word:
        cut = len(word)
        if cut > width:
            cut = max(word.rfind(mark, 0, width) for mark in "./,") + 1 or width
        part = _Part(word[:cut])
        part.start = start
        yield part
        word, start = word[cut:], False


def labelled(label: str, text: str, width: int, style: str = "plain") -> Iterator[Line]:
    """Yields `` CAUSE    text`` with further lines of the text aligned below."""
    indent = max(len(label) + 2, 10)
    for number, line in enumerate(wrap(text, width - indent)):
        head = (f" {label}".ljust(indent), "label") if number == 0 else (" " * indent, "plain")
        yield head, (line, style)


def to_type(label: str, command: str, width: int) -> Iterator[Line]:
    """Yields a command to type, continued as a shell continues it; on one line, however long, if a
    word of it, such as a path, is longer than a line."""
    room = width - max(len(label) + 2, 10) - 2
    if any(len(word) > room for word in command.split()):
        yield (f" {label}".ljust(max(len(label) + 2, 10)), "label"), (command, "faint")
        return
    *before, last = labelled(label, command, width - 2, "faint")
    for *head, (text, style) in before:
        yield (*head, (f"{text} \\", style))
    yield last


def indented(text: str, width: int, indent: int, style: str = "plain") -> Iterator[Line]:
    """Yields wrapped text, every line indented by ``indent`` columns."""
    for line in wrap(text, width - indent):
        yield (" " * indent, "plain"), (line, style)


def flow(pieces: Iterable[Piece], width: int, gap: str = "    ", indent: int = 1) -> Iterator[Line]:
    """Yields pieces side by side with ``gap`` between, on as many lines as needed; wraps a piece
    longer than a line."""
    line: list[Piece] = []
    used = 0
    room = width - indent
    short = (
        (part, style)
        for text, style in pieces
        for part in (wrap(text, room) if len(text) > room else [text])
    )
    for text, style in short:
        if line and used + len(gap) + len(text) > width:
            yield tuple(line)
            line = []
        if not line:
            line, used = [(" " * indent, "plain")], indent
        else:
            line.append((gap, "faint"))
            used += len(gap)
        line.append((text, style))
        used += len(text)
    if line:
        yield tuple(line)


def at_right(lines: Sequence[Line], text: str, style: str, width: int) -> Iterator[Line]:
    """Yields the lines, with ``text`` right-aligned on the last one, or below it if full."""
    yield from lines[:-1]
    last = lines[-1]
    space = width - sum(len(piece) for piece, _ in last) - len(text)
    if space >= 2:
        yield (*last, (" " * space, "plain"), (text, style))
    else:
        yield last
        yield (" " * max(width - len(text), 1), "plain"), (text, style)


def definitions(rows: Mapping[str, str], width: int) -> Iterator[str]:
    """Yields each name with its wrapped text beside it, or below a name that takes too much of
    ``width``."""
    indent = min(max(map(len, rows), default=0), max(width // 2, 8)) + 2
    for name, text in rows.items():
        lines = wrap(text, width - indent)
        beside = lines.pop(0) if len(name) + 2 <= indent else ""
        yield (name.ljust(indent) + beside).rstrip()
        yield from (" " * indent + line for line in lines)


def columns(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Returns cells padded to the width of their column, except the last column."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return [
        [cell.ljust(size) for cell, size in zip(row[:-1], widths, strict=False)] + [row[-1]]
        for row in rows
    ]


def plain(line: Line) -> str:
    """Returns the line without its styles."""
    return printable("".join(text for text, _ in line)).rstrip()
