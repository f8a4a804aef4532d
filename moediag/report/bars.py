"""Inline SVG bars beside numbers, to compare variants at a glance."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from moediag.report.page import FixRow
from moediag.result import TrialResult, Verdict

WIDTH, HEIGHT = 84, 10  # pixels
SMALLEST = 1e-9  # gradient errors from here to 1 fill the bar; the scale is logarithmic


def time_bar(ratio: float | None, rows: Sequence[FixRow]) -> Markup:
    """Returns a bar of the step time relative to the unfixed step, drawn as a line; nothing if not
    measured. ``rows``: the whole table, so that bars are comparable."""
    if ratio is None or not math.isfinite(ratio) or ratio <= 0:
        return Markup("")
    measured = [r.ratio for r in rows if r.ratio is not None and math.isfinite(r.ratio)]
    most = max(1.25, *measured)
    one = WIDTH / most
    return _svg(
        f"{ratio:.2f} of the unfixed step time",
        ratio / most,
        "time",
        f'<line class="one" x1="{one:.1f}" y1="0" x2="{one:.1f}" y2="{HEIGHT}"/>',
    )


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
