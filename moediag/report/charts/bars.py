"""Bars beside numbers, to compare variants at a glance."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from moediag.report.page import FixRow
from moediag.result import TrialResult, Verdict

WIDTH, HEIGHT = 120, 12  # pixels
SMALLEST = 1e-9  # gradient errors from here to 1 fill the bar; the scale is logarithmic


def time_bar(row: FixRow, rows: Sequence[FixRow]) -> Markup:
    """Returns a bar of the step time relative to the unfixed step, drawn as a line, and its
    quartiles; nothing if not measured. ``rows``: the whole table, so that bars are comparable."""
    times = _times(row)
    if not times:
        return Markup("")
    most = max(1.25, *(time for other in rows for time in _times(other)))
    one = WIDTH / most
    more = f'<line class="one" x1="{one:.1f}" y1="0" x2="{one:.1f}" y2="{HEIGHT}"/>'
    if len(times) == 3:
        low, high = (WIDTH * time / most for time in times[1:])
        more += f'<path class="spread" d="M{low:.1f} 3v6m0-3H{high:.1f}m0-3v6"/>'
    return _svg(f"{times[0]:.2f} of the unfixed step time", times[0] / most, "time", more)


def _times(row: FixRow) -> list[float]:
    """Returns the ratio and its quartiles, as far as they are measured."""
    times = [] if row.ratio is None else [row.ratio, *(row.spread or ())]
    return times if all(math.isfinite(time) and time > 0 for time in times) else []


def error_bar(trial: TrialResult) -> Markup:
    """Returns a bar of the largest gradient error (log scale), none for 0 or if not compared."""
    if trial.gradient_error is None or not trial.parameters_compared:
        return Markup("")
    error = float(trial.gradient_error)  # "nan" and "inf" may be text, as in JSON
    if not math.isfinite(error):
        share = 1.0
    elif error <= SMALLEST:
        share = 0.0
    else:
        share = min(1.0, 1 - math.log10(error) / math.log10(SMALLEST))
    kind = "good" if trial.verdict == Verdict.CLEAN else "bad"
    return _svg(f"gradient error {error:g}, logarithmic", share, kind, "")


def _svg(label: str, share: float, kind: str, more: str) -> Markup:
    # Only numbers and moediag's own words.
    return Markup(  # noqa: S704
        f'<svg class="bar" role="img" aria-label="{label}" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}"><rect class="all" width="{WIDTH}" height="{HEIGHT}" '
        f'opacity=".4"/><rect class="{kind}" width="{WIDTH * share:.1f}" height="{HEIGHT}"/>'
        f"{more}</svg>"
    )
