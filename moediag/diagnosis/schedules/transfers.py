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
from moediag.evidence.model import Collective, Evidence, Group
from moediag.records import dataclass

_OTHERS = 2  # ranks that send elsewhere in one line
_AGREEING = 3  # ends of links with one count
_PAST = 3  # earlier steps in which the links must have been alike

Line = tuple[str, str]
End = tuple[object, int]  # a channel, or an operation, and a rank


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


def left_out(found: Divergence, evidence: Evidence) -> Divergence | None:
    """Of a circle of waits, the call that one rank left out, or would make later than all others:
    these, at least three, made it as often as the one that waits there, and before the call that
    the rank is in."""
    waiting = {rank: call for rank, call in found.calls.items() if call is not None and call.site}
    if found.kind != "order" or len(evidence.ranks) <= _AGREEING:
        return None
    for line in dict.fromkeys(_line(call) for call in waiting.values()):
        made = {rank: _of_line(evidence, rank, line) for rank in evidence.ranks}
        number = max(len(calls) for calls in made.values())
        fewer = [rank for rank, calls in made.items() if len(calls) < number]
        other = fewer[0] if len(fewer) == 1 else None
        if other is None or other not in waiting or len(made[other]) != number - 1:
            continue
        instead = _of_line(evidence, other, _line(waiting[other]))
        for rank, call in waiting.items():
            group = evidence.ranks[rank].groups.get(call.group)
            if _line(call) != line or group is None or other not in group.ranks:
                continue
            agreeing = [
                r
                for r in sorted(made)
                if r != other
                and (
                    len(later := _of_line(evidence, r, _line(waiting[other]))) < len(instead)
                    or made[r][-1] < later[len(instead) - 1]
                )
            ]
            if len(agreeing) == len(made) - 1:
                return Divergence(
                    "transfer", group, call.position, {rank: call, other: waiting[other]},
                    odd=other, counts={rank: number, other: number - 1}, agreeing=tuple(agreeing),
                )  # fmt: skip
            break
    return None


def _of_line(evidence: Evidence, rank: int, line: Line) -> list[int]:
    """The indices of the rank's calls from a line."""
    return [call.index for call in evidence.ranks[rank].collectives if _line(call) == line]


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
        number = lines[given.rank, call.statement].index(call)
        if any((rank, call.statement) not in lines for rank in group.ranks):
            continue  # the ends of a pipeline have other peers
        others = {
            rank: made[number]
            for rank in group.ranks
            if rank != given.rank and len(made := lines.get((rank, call.statement), [])) > number
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
                found[(rank, call.statement)].append(call)
    return found


# ------------------------------------------------------------------------ more or less often


def _miscounted(gaps: Iterable[_Gap], aligned: Aligned, evidence: Evidence) -> Iterator[Divergence]:
    """Transfers that a rank waits for, where the other links show how many there should be."""
    waits = {gap.rank: gap for gap in gaps if _waits_in(gap, evidence)}
    links = _Links(aligned, evidence) if waits else None
    for gap in waits.values():
        beyond = waits.get(gap.peer)
        if beyond is not None and beyond.peer != gap.rank:
            continue  # its peer waits for a third rank
        line = _line(gap.first)
        meets = {_line(m) for c, m in zip(gap.calls, gap.met, strict=False) if _line(c) == line}
        if links is not None and line[1] and len(meets) == 1:
            for by_rank in (False, True):
                yield from links.odd(gap, frozenset((line, *meets)), by_rank)


class _Links:
    """How often each end of each channel was used, by step. Where training steps are not known, a
    step ends where a rank goes from sends and receives to a collective."""

    def __init__(self, aligned: Aligned, evidence: Evidence) -> None:
        self._aligned, self._evidence = aligned, evidence
        self._inside = {rank for rank in evidence.ranks if _inside(evidence, rank)}
        self._steps: dict[tuple[int, int], int] = {}
        self._known: dict[tuple[frozenset[Line], bool], dict[End, dict[int, int]]] = {}
        told = {call.step for seen in evidence.ranks.values() for call in seen.collectives}
        for rank, seen in evidence.ranks.items() if len(told) < 2 else ():
            step, sends = 1, False
            for call in seen.collectives:
                before, sends = sends, call.op in POINT_TO_POINT
                step += before and not sends
                self._steps[rank, call.index] = step

    def _step(self, rank: int, call: Collective) -> int:
        return self._steps.get((rank, call.index), call.step)

    def odd(self, gap: _Gap, lines: frozenset[Line], by_rank: bool) -> Iterator[Divergence]:
        """``by_rank``: the calls of a rank count together, whatever their peers."""
        step, counts = self._step(gap.rank, gap.first), self._counts(lines, by_rank)
        back = "recv" if gap.first.op == "send" else "send"
        ends: list[End] = [(gap.first.op, gap.rank), (back, gap.peer)]
        if not by_rank:
            ends = [(gap.channel.ends, rank) for _, rank in ends]
        here, there = (counts[end].get(step, 0) for end in ends)
        if here <= there or not _equal(counts.values(), step):
            return
        votes = {
            end: (of.get(step, 0), end[1] not in self._inside)
            for end, of in counts.items()
            if end not in ends
        }
        for who, count in ((gap.peer, here), (gap.rank, there)):
            more = who == gap.rank  # a rank that waits in a transfer may make more
            unsure = gap.peer in self._inside
            if unsure and (more or not self._left_out(gap, here, lines, by_rank)):
                continue
            agree = {e for e, (n, final) in votes.items() if n == count and (final or not more)}
            others = [vote for (_, rank), vote in votes.items() if rank != who]
            fits = all(n == count or (not final and n < count) for n, final in others)
            ranks = {gap.rank, gap.peer, *(rank for _, rank in agree)} - {who}
            if fits and len(agree) + 1 >= _AGREEING and len(ranks) >= _OTHERS:
                theirs = [call for call in gap.met if _line(call) in lines]
                calls: dict[int, Collective | None] = {gap.rank: gap.first, gap.peer: theirs[-1]}
                yield Divergence(
                    "transfer", gap.channel.group, gap.first.position, calls, odd=who,
                    counts={gap.rank: here, gap.peer: there}, agreeing=tuple(sorted(ranks)),
                )  # fmt: skip

    def _left_out(self, gap: _Gap, number: int, lines: frozenset[Line], by_rank: bool) -> bool:
        """Whether the peer, in its step before, made the call of that number before the one that it
        waits in now."""
        last = _last(self._evidence, gap.peer)
        if last is None:
            return False
        steps: dict[int, list[Collective]] = defaultdict(list)
        for call in self._evidence.ranks[gap.peer].collectives:
            if call.index <= last.index:
                steps[self._step(gap.peer, call)].append(call)
        now = self._step(gap.peer, last)
        count = sum(_line(c) == _line(last) for c in steps[now])
        there = [c.index for c in steps[now - 1] if _line(c) == _line(last)]
        met = [
            c.index
            for c in steps[now - 1]
            if _line(c) in lines and c.op != gap.first.op and (by_rank or c.peer == gap.rank)
        ]
        enough = len(there) >= count and len(met) >= number
        return enough and met[number - 1] < there[count - 1]

    def _counts(self, lines: frozenset[Line], by_rank: bool) -> dict[End, dict[int, int]]:
        """Per end of a channel, or per operation and rank, the number of calls from ``lines`` by
        step."""
        if (lines, by_rank) in self._known:
            return self._known[lines, by_rank]
        found: dict[End, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for channel in self._aligned.channels:
            sides = (channel.sender, channel.sends), (channel.receiver, channel.receives)
            for rank, calls in sides:
                for call in calls:
                    if _line(call) in lines:
                        end = call.op if by_rank else channel.ends, rank
                        found[end][self._step(rank, call)] += 1
        self._known[lines, by_rank] = found
        return found


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


def _equal(counts: Iterable[Mapping[int, int]], step: int) -> bool:
    """Whether all ends had equal counts in each of the last steps before ``step``."""
    every = list(counts)
    before = sorted({s for of in every for s in of if s < step})[-_PAST:]
    return all(len({of.get(s, 0) for of in every}) == 1 for s in before)
