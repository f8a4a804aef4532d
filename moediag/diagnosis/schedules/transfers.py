"""Finds the rank that sends to another peer, or makes a transfer more or less, than the others do.

A send without its receive concerns two ranks, and either may be wrong. Other ranks tell where they
do the same in the same lines, one position further: in a ring all send to the next rank, and in a
pipeline all links carry equally many micro-batches. One rank is named against at least three ends
of links that agree; links of which the job's past does not say that they are alike name nobody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from moediag.diagnosis.schedules.align import POINT_TO_POINT, Aligned, Channel, further
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.diagnosis.schedules.usual_order import line_of
from moediag.evidence.model import Collective, Evidence, Group
from moediag.records import dataclass

_OTHERS = 2  # ranks that send elsewhere in one line
_AGREEING = 3  # ends of links with one count
_PAST = 3  # earlier steps in which the links must have been alike

Line = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Gap:
    """The calls of one end of a channel that its other end has not met."""

    channel: Channel
    rank: int
    peer: int
    calls: tuple[Collective, ...]
    """All calls of the rank on the channel; from ``first`` on they were not met."""
    met: tuple[Collective, ...]

    @property
    def first(self) -> Collective:
        return self.calls[len(self.met)]


def misaddressed(aligned: Aligned, evidence: Evidence) -> Divergence | None:
    """The send or receive whose peer or tag departs from those of the other ranks in that line."""
    return _one(_misaddressed(_gaps(aligned, evidence), evidence))


def miscounted(aligned: Aligned, evidence: Evidence) -> Divergence | None:
    """The transfer that one rank makes more or less often than the other links show."""
    return _one(_miscounted(_gaps(aligned, evidence), aligned, evidence))


def _one(found: Iterator[Divergence]) -> Divergence | None:
    """The first, if all show the same rank, or none shows any."""
    every = list(found)
    every = [one for one in every if one.odd is not None] or every
    return every[0] if len({one.odd for one in every}) == 1 else None


def _gaps(aligned: Aligned, evidence: Evidence) -> list[_Gap]:
    channels = aligned.channels if evidence.stall is not None else ()
    return [gap for channel in channels if (gap := _gap(channel)) is not None]


def _gap(channel: Channel) -> _Gap | None:
    sends, receives = tuple(channel.sends), tuple(channel.receives)
    if not channel.whole or len(sends) == len(receives):
        return None
    if len(sends) > len(receives):
        return _Gap(channel, channel.sender, channel.receiver, sends, receives)
    return _Gap(channel, channel.receiver, channel.sender, receives, sends)


# ------------------------------------------------------------------------ to another peer


def _misaddressed(gaps: Iterable[_Gap], evidence: Evidence) -> Iterator[Divergence]:
    """Calls that nobody meets, of ranks of which others wait for such a call, where that peer or
    tag is the one that the other ranks have in that line."""
    made: dict[int, list[_Gap]] = defaultdict(list)
    missed: dict[int, list[_Gap]] = defaultdict(list)
    for gap in gaps:
        made[gap.rank].append(gap)
        missed[gap.peer].append(gap)
    lines = _by_line(evidence) if made.keys() & missed.keys() else {}
    for rank in sorted(made.keys() & missed.keys()):
        for given in made[rank]:
            for wanted in missed[rank]:
                group = given.channel.group
                if wanted.channel.group != group or wanted.first.op == given.first.op:
                    continue
                call, peers = _unlike(given, wanted, lines)
                both = not (given.first.asynchronous or wanted.first.asynchronous)
                if call is None and not (both and given.peer == wanted.rank):
                    continue
                call = call or given.first
                calls: dict[int, Collective | None] = {rank: call, wanted.rank: wanted.first}
                yield Divergence(
                    "peer", group, call.position, calls, odd=rank if peers else None,
                    agreeing=peers,
                )  # fmt: skip


def _unlike(
    given: _Gap, wanted: _Gap, lines: Mapping[object, list[Collective]]
) -> tuple[Collective | None, tuple[int, ...]]:
    """The call of ``given`` in place of which all other ranks, as often in that line,
    had the peer and tag that are ``wanted``; and those ranks. A peer is equally far from each rank
    around the end of the group, or its position differs in the same bits."""
    group = given.channel.group
    for call in given.calls:
        number = lines[given.rank, line_of(call)].index(call)
        if any((rank, line_of(call)) not in lines for rank in group.ranks):
            continue  # the ends of a pipeline have other peers
        others = {
            rank: made[number]
            for rank in group.ranks
            if rank != given.rank and len(made := lines.get((rank, line_of(call)), [])) > number
        }
        for way in (further, _bits):
            usual = way(group, given.rank, wanted.rank), wanted.first.tag
            if len(others) < _OTHERS or usual == (way(group, given.rank, given.peer), call.tag):
                continue
            if all(c.peer is not None and (way(group, rank, c.peer), c.tag) == usual
                   for rank, c in others.items()):  # fmt: skip
                return call, tuple(others)
    return None, ()


def _bits(group: Group, rank: int, peer: int) -> int:
    return group.ranks.index(peer) ^ group.ranks.index(rank)


def _by_line(evidence: Evidence) -> dict[object, list[Collective]]:
    found: dict[object, list[Collective]] = defaultdict(list)
    for rank, seen in evidence.ranks.items():
        for call in seen.collectives:
            if call.op in POINT_TO_POINT and call.site:
                found[(rank, line_of(call))].append(call)
    return found


# ------------------------------------------------------------------------ more or less often


def _miscounted(gaps: Iterable[_Gap], aligned: Aligned, evidence: Evidence) -> Iterator[Divergence]:
    """Transfers that a rank waits for, where the other links show how many there should be."""
    waits = {gap.rank: gap for gap in gaps if _waits_in(gap, evidence)}
    inside = {rank for rank in evidence.ranks if _inside(evidence, rank)}
    for gap in waits.values():
        beyond = waits.get(gap.peer)
        if beyond is not None and beyond.peer != gap.rank:
            continue  # its peer waits for a third rank
        line = _line(gap.first)
        meets = {_line(m) for c, m in zip(gap.calls, gap.met, strict=False) if _line(c) == line}
        if not line[1] or len(meets) != 1:
            continue
        for by_rank in (False, True):
            yield from _by_counts(gap, {line, *meets}, by_rank, inside, aligned, evidence)


def _by_counts(
    gap: _Gap, lines: set[Line], by_rank: bool, inside: set[int], aligned: Aligned,
    evidence: Evidence,
) -> Iterator[Divergence]:  # fmt: skip
    """``by_rank``: the calls of a rank count together, whatever their peers. ``inside``: ranks that
    may make more transfers."""
    step, counts = gap.first.step, _counts(aligned, lines, by_rank)
    back = "recv" if gap.first.op == "send" else "send"
    ends: list[tuple[object, int]] = [(gap.first.op, gap.rank), (back, gap.peer)]
    if not by_rank:
        ends = [(gap.channel.ends, rank) for _, rank in ends]
    here, there = (counts[end].get(step, 0) for end in ends)
    if here <= there or not _equal(counts.values(), step):
        return
    votes = {
        end: (of.get(step, 0), end[1] not in inside)
        for end, of in counts.items()
        if end not in ends
    }
    for who, count in ((gap.peer, here), (gap.rank, there)):
        more = who == gap.rank  # a rank that waits in a transfer may make more
        if gap.peer in inside and (more or not _left_out(gap, here, lines, by_rank, evidence)):
            continue
        agree = {e for e, (n, final) in votes.items() if n == count and (final or not more)}
        others = [vote for (_, rank), vote in votes.items() if rank != who]
        fits = all(n == count or (not final and n < count) for n, final in others)
        ranks = {gap.rank, gap.peer, *(rank for _, rank in agree)} - {who}
        if fits and len(agree) + 1 >= _AGREEING and len(ranks) >= _OTHERS:
            calls = {gap.rank: gap.first, gap.peer: _last(evidence, gap.peer)}
            made = {gap.rank: here, gap.peer: there}
            yield Divergence(
                "transfer", gap.channel.group, gap.first.position, calls, counts=made, odd=who,
                agreeing=tuple(sorted(ranks)),
            )  # fmt: skip


def _left_out(gap: _Gap, number: int, lines: set[Line], by_rank: bool, evidence: Evidence) -> bool:
    """Whether the peer, in its step before, made the call of that number before the one that it
    waits in now."""
    own, last = evidence.ranks[gap.peer].collectives, _last(evidence, gap.peer)
    if last is None:
        return False
    now = sum(_line(c) == _line(last) for c in own if c.step == last.step and c.index <= last.index)
    before = [c for c in own if c.step == gap.first.step - 1]
    there = [c.index for c in before if _line(c) == _line(last)]
    met = [
        c.index
        for c in before
        if _line(c) in lines and c.op != gap.first.op and (by_rank or c.peer == gap.rank)
    ]
    return len(there) >= now and len(met) >= number and met[number - 1] < there[now - 1]


def _waits_in(gap: _Gap, evidence: Evidence) -> bool:
    assert evidence.stall is not None
    waiting = gap.rank in evidence.stall.waiting and not gap.first.completed
    return waiting and not gap.first.asynchronous


def _inside(evidence: Evidence, rank: int) -> bool:
    """Whether the rank waits in a send or receive, or may make more of them."""
    call = _last(evidence, rank)
    return call is None or (call.op in POINT_TO_POINT and not call.completed)


def _last(evidence: Evidence, rank: int) -> Collective | None:
    """The call that the rank waits in, or its last one."""
    calls = evidence.ranks[rank].collectives
    own = (call for call in reversed(calls) if not (call.completed or call.asynchronous))
    return next(own, calls[-1] if calls else None)


def _line(call: Collective) -> Line:
    return call.op, call.site


def _counts(
    aligned: Aligned, lines: set[Line], by_rank: bool
) -> dict[tuple[object, int], dict[int, int]]:
    """Per end of a channel, or per operation and rank, the number of calls from ``lines`` by
    step."""
    found: dict[tuple[object, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for channel in aligned.channels:
        for rank, calls in (
            (channel.sender, channel.sends),
            (channel.receiver, channel.receives),
        ):
            for call in calls:
                if _line(call) in lines:
                    found[call.op if by_rank else channel.ends, rank][call.step] += 1
    return found


def _equal(counts: Iterable[Mapping[int, int]], step: int) -> bool:
    """Whether all ends had equal counts in each of the last steps before ``step``."""
    every = list(counts)
    before = sorted({s for of in every for s in of if s < step})[-_PAST:]
    return all(len({of.get(s, 0) for of in every}) == 1 for s in before)
