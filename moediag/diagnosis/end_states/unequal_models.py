"""Explains a crash of ranks that DistributedDataParallel stopped because their models differ."""

from __future__ import annotations

import re
from collections.abc import Iterable

from moediag.diagnosis.end_states.failures import Failure
from moediag.result.wording import ranks

NEXT = "Make the same model on all ranks before DistributedDataParallel wraps it."
# From torch/csrc/distributed/c10d/reducer.cpp. Every rank raises it.
_COUNTS = re.compile(r"Rank (\d+) has (\d+) params, while rank (\d+) has inconsistent (\d+) params")


def of_crash(own: Iterable[Failure]) -> tuple[tuple[int, ...], str] | None:
    """The ranks whose models are unlike those of most ranks, () if it is not known which are wrong,
    and how many parameters each has; None where another error was raised."""
    counts: dict[int, int] = {}
    for failure in own:
        for one, its, other, theirs in _COUNTS.findall(failure.message):
            counts |= {int(one): int(its), int(other): int(theirs)}
    if not counts:
        return None
    alike: dict[int, list[int]] = {}
    for rank, count in sorted(counts.items()):
        alike.setdefault(count, []).append(rank)
    most = max(alike.values(), key=len)
    odd = tuple(sorted(counts.keys() - {*most})) if 2 * len(most) > len(counts) else ()
    told = ", ".join(f"{count} on {ranks(who)}" for count, who in alike.items())
    unknown = "" if odd else " It is not known which of them is wrong."
    return odd, f"The numbers of parameters are {told}.{unknown}"
