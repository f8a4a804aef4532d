"""What the program itself shows beside its calls: exceptions that it handles, and batches."""

from __future__ import annotations

from collections.abc import Mapping

from moediag.diagnosis.end_states.ended_threads import said
from moediag.diagnosis.words.calls import first_few
from moediag.evidence.model import BatchCount, Evidence
from moediag.records import dataclass
from moediag.result.wording import ranks


@dataclass(frozen=True, slots=True)
class UnequalBatches:
    """One pass of a data loader that ended earlier on some ranks than on others."""

    line: str
    #: Rank -> batches.
    counts: Mapping[int, int]
    #: Ranks whose pass was not over.
    going_on: tuple[int, ...]

    @property
    def sentence(self) -> str:
        """``The data loader at train.py:88 gave 31 batches on rank 1, at least 32 on rank 0.``"""
        told: dict[str, list[int]] = {}
        for rank, number in sorted(self.counts.items(), key=lambda one: (one[1], one[0])):
            least = "at least " if rank in self.going_on else ""
            text = f"{least}{number:,} batch{'' if number == 1 else 'es'}"
            told.setdefault(text, []).append(rank)
        sides = [f"{text} on {ranks(who)}" for text, who in first_few(told.items())]
        return f"The data loader at {self.line.partition(' ')[0]} gave {', '.join(sides)}."


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
                return UnequalBatches(line, {r: one.number for r, one in here.items()}, going_on)
    return None


def handled(evidence: Evidence) -> str:
    """Which ranks were in a handler of an exception when they were examined."""
    return " ".join(
        f"Rank {rank} is handling an exception ({said(seen.handling)})."
        for rank, seen in sorted(evidence.ranks.items())
        if seen.handling is not None
    )
