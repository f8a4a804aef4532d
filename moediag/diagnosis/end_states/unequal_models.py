"""Explains a crash of ranks that DistributedDataParallel stopped because their models differ."""

from __future__ import annotations

import re
from collections.abc import Iterable

from moediag.diagnosis.end_states.failures import Failure
from moediag.result.wording import by_value, on_each

NEXT = "Make the same model on all ranks before DistributedDataParallel wraps it."
# From torch/csrc/distributed/c10d/reducer.cpp. Every rank raises it.
_COUNTS = re.compile(r"Rank (\d+) has (\d+) params, while rank (\d+) has inconsistent (\d+) params")


def of_crash(alike: Iterable[Failure], world: int) -> tuple[tuple[int, ...], str] | None:
    """The ranks whose models are unlike those of more than half of all ranks, () if it is not known
    which are wrong, and how many parameters each has; None where another error was raised. A
    message names the first rank that differs: without those of the others it may be right.
    ``world``: the number of ranks, 0 if unknown."""
    counts: dict[int, int] = {}
    for failure in alike:
        for one, its, other, theirs in _COUNTS.findall(failure.message):
            counts |= {int(one): int(its), int(other): int(theirs)}
    if not counts:
        return None
    most = max(by_value(counts).values(), key=len)
    sure = 0 < world < 2 * len(most)
    odd = tuple(sorted(counts.keys() - {*most})) if sure else ()
    unknown = "" if odd else " It is not known which of them is wrong."
    return odd, f"The numbers of parameters are {', '.join(on_each(counts))}.{unknown}"
