"""Passes of data loaders that ended earlier on some ranks than on others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from moediag.evidence.model import BatchCount, Evidence
from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class UnequalBatches:
    """One pass of a data loader that ended earlier on some ranks than on others."""

    line: str
    #: Rank -> batches.
    counts: Mapping[int, int]
    #: Ranks whose pass was not over.
    going_on: tuple[int, ...]
    #: No rank has begun another pass at that line.
    last: bool


def unequal_batches(evidence: Evidence) -> UnequalBatches | None:
    """The first pass that is known to have ended earlier on some ranks. Passes are compared by line
    and number, as far as all ranks that used a loader at that line began them."""
    passes: dict[str, dict[int, list[BatchCount]]] = {}
    for rank, seen in evidence.ranks.items():
        for one in seen.batches:
            passes.setdefault(one.line, {}).setdefault(rank, []).append(one)
    for line, by_rank in passes.items():
        for number in range(min(len(own) for own in by_rank.values()) if line else 0):
            here = {rank: own[number] for rank, own in by_rank.items()}
            ended = [one.number for one in here.values() if one.ended]
            # A pass that was not over may end with the same number.
            if ended and max(one.number for one in here.values()) > min(ended):
                going_on = tuple(sorted(rank for rank, one in here.items() if not one.ended))
                last = all(len(own) == number + 1 for own in by_rank.values())
                counts = {rank: one.number for rank, one in here.items()}
                return UnequalBatches(line, counts, going_on, last)
    return None


def ran_out(evidence: Evidence) -> tuple[int, ...]:
    """The ranks whose last pass ended with fewer batches than that of more than half of all ranks,
    which all got equally many or go on; () if that does not part the ranks in two."""
    found = unequal_batches(evidence)
    if found is None or not found.last or len(found.counts) < evidence.world_size:
        return ()
    got = {r: None if r in found.going_on else number for r, number in found.counts.items()}
    (usual, size), *others = Counter(got.values()).most_common()
    if len(others) != 1 or 2 * size <= evidence.world_size:
        return ()
    outside = tuple(sorted(rank for rank, number in got.items() if number != usual))
    most = min(number for rank, number in found.counts.items() if rank not in outside)
    return outside if all(got[r] is not None and found.counts[r] < most for r in outside) else ()
