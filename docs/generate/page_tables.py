"""Tables of reference pages, in markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table."""
    for row in (head, ("---",) * len(head), *rows):
        yield "| " + " | ".join(" ".join(text.split()).replace("|", "\\|") for text in row) + " |"
