"""One bar for each number, below each other, and a line that they should not cross."""

from __future__ import annotations

from markupsafe import Markup

from moediag.report.charts import svg
from moediag.result.answer_blocks import Bars

ROW = 18  # pixels
ROOM = 8.0  # percent of the width for the number beside the longest bar
_KINDS = {"good": "good", "bad": "bad"}


def number_bars(bars: Bars) -> Markup:
    most = max([bars.limit, *(value for _, value, _ in bars.rows)], default=0.0) or 1.0
    left, room = svg.GUTTER + 6, 100 - svg.GUTTER - 6 - ROOM
    parts = []
    for number, (name, value, style) in enumerate(bars.rows):
        y, width = number * ROW, room * max(value, 0.0) / most
        parts += [
            svg.text(name, 0, y + 13),
            svg.rect(_KINDS.get(style, "done"), left, y + 3, width, ROW - 6),
            svg.text(f"{value:,.1f}", left + width + 1, y + 13),
        ]
    height = ROW * len(bars.rows)
    if bars.limit:
        parts.append(svg.rect("tick", left + room * bars.limit / most, 0, 0.2, height))
    return svg.chart(bars.title, height, parts)
