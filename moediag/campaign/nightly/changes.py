"""Tonight against the nights before: what is new, what got fixed, what still fails since when, what
is flaky. Pure.

Nights in which a variant could not be judged are skipped over: they neither end nor begin anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moediag.campaign.nightly.night import Entry, Night, State
from moediag.result.verdicts import StrEnum

NIGHTS = 7  # within which contradicting verdicts on one stack are flaky


class Change(StrEnum):
    NEW = "new"
    FIXED = "fixed"
    STILL = "still"
    FLAKY = "flaky"
    SAME = "same"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Seen:
    """An entry and the night it is from."""

    night: str
    entry: Entry


@dataclass(frozen=True, slots=True)
class Compared:
    """``since``: the first night of this failure (``still``), or of the one that is gone
    (``fixed``); ``before``: what was known last; ``last_good``: the last good night, for what is
    bad tonight; ``outcomes``: what one stack showed within the window (``flaky``), oldest first."""

    entry: Entry
    change: Change
    since: Seen | None = None
    before: Seen | None = None
    last_good: Seen | None = None
    outcomes: tuple[Seen, ...] = ()


def compare(tonight: Night, earlier: Sequence[Night], window: int = NIGHTS) -> tuple[Compared, ...]:
    """Every entry of ``tonight``, in its order. ``earlier``: in any order, other lanes and later
    nights are left out; ``window``: nights, tonight included."""
    before = sorted(
        (n for n in earlier if n.lane == tonight.lane and n.started < tonight.started),
        key=lambda night: night.started,
    )
    return tuple(_one(entry, tonight, before, window) for entry in tonight.entries)


def _one(entry: Entry, tonight: Night, before: Sequence[Night], window: int) -> Compared:
    known = list(_known(entry, before))
    last = known[-1] if known else None
    if entry.state == State.UNKNOWN:
        return Compared(entry, Change.UNKNOWN, before=last)
    contradicting = _contradicting(entry, tonight, before, window)
    if contradicting:
        return Compared(entry, Change.FLAKY, before=last, outcomes=contradicting)
    good = [seen for seen in known if seen.entry.state == State.GOOD]
    last_good = good[-1] if good else None
    if entry.state == State.GOOD:
        if last is None or last.entry.state == State.GOOD:
            return Compared(entry, Change.SAME, before=last)
        return Compared(entry, Change.FIXED, _since(known, last.entry), last, last_good)
    if last is not None and _same_failure(last.entry, entry):
        return Compared(entry, Change.STILL, _since(known, entry), last, last_good)
    return Compared(entry, Change.NEW, None, last, last_good)


def _known(entry: Entry, nights: Sequence[Night]) -> Iterator[Seen]:
    """What the nights say about it, oldest first, where they say anything."""
    for night in nights:
        for other in night.entries:
            if other.key == entry.key and other.state != State.UNKNOWN:
                yield Seen(night.started, other)


def _contradicting(
    entry: Entry, tonight: Night, before: Sequence[Night], window: int
) -> tuple[Seen, ...]:
    """What this very stack showed within the window, where that differs. A judgement of another
    moediag is no contradiction."""
    near = list(before)[-(window - 1) :] if window > 1 else []
    same = [n for n in near if n.moediag_version == tonight.moediag_version]
    seen = [s for s in _known(entry, same) if s.entry.stack == entry.stack]
    seen.append(Seen(tonight.started, entry))
    return tuple(seen) if len({s.entry.outcome for s in seen}) > 1 else ()


def _same_failure(one: Entry, other: Entry) -> bool:
    return one.state == other.state == State.BAD and one.signature == other.signature


def _since(known: Sequence[Seen], failure: Entry) -> Seen | None:
    """The first of the unbroken row of nights, up to the last, with this failure."""
    first = None
    for seen in reversed(known):
        if not _same_failure(seen.entry, failure):
            break
        first = seen
    return first
