"""Finds ranks that depart from what the job usually does, where no majority opposes them.

In groups of two, and where two ranks wait for each other, the calls alone do not show which rank is
wrong. The rest of the job does: the same few calls were made many times before, by this rank and by
its siblings in other replicas, and nearly always the same call followed. The rank that continues
with another call, while its opponents continue as usual, departed. This is weak evidence (a step
may legitimately differ), so it decides only where nothing else does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moediag.evidence.model import Collective, Evidence

LENGTHS = (48, 24, 12, 6)  # calls before; the longest that was ever seen elsewhere decides
LOOK_BACK = 96  # calls before the divergence in which the departure may lie
SEEN_OFTEN = 3
MOST_CALLS = 250_000  # of all ranks together

_BASE, _MODULUS = 1_000_003, (1 << 61) - 1


@dataclass(frozen=True, slots=True)
class Departure:
    """One departure from the usual order."""

    rank: int
    call: Collective  # the call of ``rank`` that departs
    usual: Collective  # the call that follows elsewhere


def departures(
    calls: Mapping[int, Collective | None], evidence: Evidence, alone: bool = False
) -> tuple[Departure, ...]:
    """Departures of the ranks that made one of ``calls``; () where none departs, or all do.
    ``alone``: their opponents were not seen or do not count, so all may depart."""
    sides = {rank: call for rank, call in calls.items() if call is not None}
    tokens, examples = _tokens(evidence, sides)
    habits = [_Habit(tokens, length) for length in LENGTHS]
    found = []
    for rank, of in sorted(sides.items()):
        own = evidence.ranks[rank].collectives
        at = next(i for i, c in enumerate(own) if c.index == of.index)
        parted = _departs(rank, at, tokens, habits)
        if parted is not None:
            place, usual = parted
            found.append(Departure(rank, own[place], examples[usual]))
    return tuple(found) if 0 < len(found) < len(sides) or alone else ()


def departed(
    calls: Mapping[int, Collective | None], evidence: Evidence, alone: bool = False
) -> tuple[int, ...]:
    """The ranks of :func:`departures`."""
    return tuple(one.rank for one in departures(calls, evidence, alone))


def _departs(
    rank: int, at: int, tokens: Mapping[int, Sequence[int]], habits: Sequence[_Habit]
) -> tuple[int, int] | None:
    """(index of the rank's departing call, token that usually follows there), or None."""
    own = tokens[rank]
    for place in range(max(1, at - LOOK_BACK), at + 1):
        for habit in habits:
            after = habit.after(rank, place)
            if after is None:
                continue
            here = own[place]
            others = after.total() - after[here]
            # A count of one is this call itself: no other rank ever continued like that.
            if after[here] <= 1 and others >= SEEN_OFTEN:
                usual, times = after.most_common(1)[0]
                if times >= 0.9 * others:
                    return place, usual
                break
            if others + after[here] > SEEN_OFTEN:
                break  # a longer context was seen often enough
    return None


class _Habit:
    """What followed each run of ``length`` calls, on all ranks."""

    def __init__(self, tokens: Mapping[int, Sequence[int]], length: int) -> None:
        self.length = length
        self.tokens = tokens
        self.sums = {rank: _sums(own) for rank, own in tokens.items()}
        self.power = pow(_BASE, length, _MODULUS)
        self.next: dict[int, Counter[int]] = defaultdict(Counter)
        for rank, own in tokens.items():
            for place in range(length, len(own)):
                self.next[self._context(rank, place)][own[place]] += 1

    def _context(self, rank: int, place: int) -> int:
        sums = self.sums[rank]
        return (sums[place] - sums[place - self.length] * self.power) % _MODULUS

    def after(self, rank: int, place: int) -> Counter[int] | None:
        """Counts of the next calls; None where the rank had not made enough calls."""
        return self.next[self._context(rank, place)] if place >= self.length else None


def _sums(tokens: Sequence[int]) -> list[int]:
    sums = [0]
    for token in tokens:
        sums.append((sums[-1] * _BASE + token) % _MODULUS)
    return sums


def _tokens(
    evidence: Evidence, sides: Mapping[int, Any]
) -> tuple[dict[int, list[int]], dict[int, Collective]]:
    """A number for each call, equal for equal calls at other places of the mesh; and an example
    call for each number."""
    numbers: dict[tuple[Any, ...], int] = {}
    examples: dict[int, Collective] = {}
    tokens: dict[int, list[int]] = {}
    order = [*sides, *(rank for rank in sorted(evidence.ranks) if rank not in sides)]
    total = 0
    for rank in order:
        seen = evidence.ranks[rank]
        total += len(seen.collectives)
        if total > MOST_CALLS and rank not in sides:
            break
        labels = {name: (g.axis or g.desc, len(g.ranks)) for name, g in seen.groups.items()}
        own = tokens[rank] = []
        for call in seen.collectives:
            toward = 0 if call.peer is None else 1 if call.peer > rank else -1
            sizes = () if call.op == "all_to_all" else (call.numel_in, call.numel_out)
            key = (labels.get(call.group), call.op, sizes, call.dtype, toward, call.site)
            number = numbers.setdefault(key, len(numbers) + 1)
            own.append(number)
            examples.setdefault(number, call)
    return tokens, examples
