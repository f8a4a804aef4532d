"""How often an intermittent failure occurred."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from moediag.result import Table, TrialResult

_Z = 1.96  # of a 95 % interval


def table(trials: Sequence[TrialResult]) -> Table | None:
    """Verdicts of each repeated variant, with their rates and 95 % intervals (Wilson's: it holds
    for few trials and for rates near 0 and 1); None without repeats."""
    by_variant: dict[str, list[TrialResult]] = {}
    for trial in trials:
        by_variant.setdefault(trial.variant, []).append(trial)
    rows = []
    for variant, own in by_variant.items():
        if len(own) == 1:
            continue
        for verdict, times in Counter(t.verdict for t in own).most_common():
            low, high = interval(times, len(own))
            rows.append((variant, verdict, f"{times} of {len(own)}", f"{low:.0%} to {high:.0%}"))
    if not rows:
        return None
    return Table(
        title="Verdicts over repeats",
        columns=("variant", "verdict", "times", "95 % interval of its rate"),
        rows=tuple(rows),
    )


def interval(times: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate that occurred ``times`` in ``of`` trials (at least one)."""
    rate, square = times / of, _Z * _Z / of
    middle = (rate + square / 2) / (1 + square)
    half = _Z * math.sqrt(rate * (1 - rate) / of + square / (4 * of)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)
