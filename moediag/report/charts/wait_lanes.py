"""When a rank made its calls: a line is a call that completed, a thick one a call that did not."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from moediag.report.charts import svg
from moediag.result import TimedRank, wording

HEIGHT = 18  # pixels
END = 80.0  # percent of the width where the last call begins; behind it is the time after it


def wait_lane(row: TimedRank, rows: Sequence[TimedRank]) -> Markup:
    """Returns the track of ``row``. ``rows``: all of the chart, which have one scale."""
    length = span(rows) or 1.0
    parts = []
    begins = [END * call.begin / length for call in row.calls]
    for call, x, until in zip(row.calls, begins, [*begins[1:], 100.0], strict=False):
        opened = call.state == "open"
        at = f"{call.text}, {1000 * call.begin:.1f} ms" + ", did not complete" * opened
        mark = svg.rect("tick", x, 2, 0.6, HEIGHT - 4)
        until = 100.0 if opened else until
        line = (4, HEIGHT - 8, "open") if opened else (HEIGHT // 2 - 1, 2, "done")
        last = not opened and row.at is None and call is row.calls[-1]
        kind = "gone" if last else line[2]
        parts.append(svg.titled(at, [svg.rect(kind, x, line[0], until - x, line[1]), mark]))
    return svg.chart(f"{wording.ranks(row.ranks)}: {state(row)}", HEIGHT, parts)


def span(rows: Sequence[TimedRank]) -> float:
    """Returns the seconds from the first to the last call."""
    return max((call.begin for row in rows for call in row.calls), default=0.0)


def state(row: TimedRank) -> str:
    """Returns how far the ranks came: ``did not complete all_gather of …``."""
    opened = next((call for call in row.calls if call.state == "open"), None)
    if opened is not None:
        return f"did not complete {opened.text}"
    if row.at is not None:
        return f"completed {row.calls[row.at].text}"
    return f"made no call after {row.calls[-1].text}" if row.calls else "made no call"
