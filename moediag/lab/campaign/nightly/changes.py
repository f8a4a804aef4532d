"""Compares tonight with earlier nights: new, fixed, still failing (and since when), flaky. Pure.

Nights in which a variant could not be judged are skipped: they neither end nor begin anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moediag.lab.campaign.nightly.night import Entry, Night, State
from moediag.records import dataclass
from moediag.result.verdicts import StrEnum

NIGHTS = 7  # contradicting verdicts on one stack within this many nights are flaky


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
    """A variant tonight, compared with earlier nights."""

    entry: Entry
    change: Change
    # first night of this failure (``still``) or of the fixed one (``fixed``)
    since: Seen | None = None
    before: Seen | None = None  # the last known entry
    last_good: Seen | None = None  # the last good night, for what is bad tonight
    # one stack's outcomes within the window (``flaky``), oldest first
    outcomes: tuple[Seen, ...] = ()


def compare(tonight: Night, earlier: Sequence[Night], window: int = NIGHTS) -> tuple[Compared, ...]:
    """Returns the comparison of every entry of ``tonight``, in its order. ``earlier``: in any
    order; other lanes and later nights are ignored; ``window``: nights, tonight included."""
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
    """Yields the known entries of earlier nights, oldest first."""
    for night in nights:
        for other in night.entries:
            if other.key == entry.key and other.state != State.UNKNOWN:
                yield Seen(night.started, other)


def _contradicting(
    entry: Entry, tonight: Night, before: Sequence[Night], window: int
) -> tuple[Seen, ...]:
    """Returns the different outcomes of this stack within the window. A verdict of another moediag
    release is no contradiction."""
    near = list(before)[-(window - 1) :] if window > 1 else []
    same = [n for n in near if n.moediag_version == tonight.moediag_version]
    seen = [s for s in _known(entry, same) if s.entry.stack == entry.stack]
    seen.append(Seen(tonight.started, entry))
    return tuple(seen) if len({s.entry.outcome for s in seen}) > 1 else ()


def _same_failure(one: Entry, other: Entry) -> bool:
    return one.state == other.state == State.BAD and one.signature == other.signature


def _since(known: Sequence[Seen], failure: Entry) -> Seen | None:
    """Returns the first of the consecutive nights, up to the last, with this failure."""
    first = None
    for seen in reversed(known):
        if not _same_failure(seen.entry, failure):
            break
        first = seen
    return first
