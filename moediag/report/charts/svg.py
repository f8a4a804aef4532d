"""Elements of an SVG. Every text is escaped by :class:`markupsafe.Markup`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup

GUTTER = 22.0  # percent of the width for the names of rows
MOST_TITLES = 1024  # cells of a chart; more have no text of their own


def chart(label: str, height: int, parts: Iterable[Markup]) -> Markup:
    """Returns an SVG as wide as its place. ``label``: read instead of it."""
    return Markup(
        '<svg class="chart" role="img" aria-label="{}" width="100%" height="{}">{}</svg>'
    ).format(label, height, Markup("").join(parts))


def rect(kind: str, x: float, y: float, width: float, height: float, opacity: float = 1) -> Markup:
    """``x`` and ``width`` in percent, the others in pixels."""
    faint = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
    return Markup('<rect class="{}" x="{:.2f}%" y="{}" width="{:.2f}%" height="{}"{}/>').format(
        kind, x, y, width, height, Markup(faint)  # noqa: S704 - a number
    )  # fmt: skip


def text(words: str, x: float, y: float, kind: str = "") -> Markup:
    """``kind``: mid for centred text, or none."""
    return Markup('<text class="{}" x="{:.2f}%" y="{}">{}</text>').format(kind, x, y, words)


def titled(title: str, parts: Iterable[Markup]) -> Markup:
    """``title``: shown where a mouse points at one of ``parts``."""
    return Markup("<g><title>{}</title>{}</g>").format(title, Markup("").join(parts))


def columns(number: int) -> tuple[Sequence[float], float]:
    """Returns the left edges of equal columns behind the names of rows, and their width."""
    width = (100 - GUTTER) / max(number, 1)
    return [GUTTER + i * width for i in range(number)], width
