"""Which dumps are of one job.

A dump names neither its job nor its attempt, and a copied file has a new date. But ranks of one job
describe their common groups alike, and issue the same call of a group at about the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from moediag.evidence.flight_calls import COMPLETED, Dump
from moediag.result.wording import ranks as of_ranks

APART = 120.0  # seconds between issues of one call; clocks of one cluster are closer
FAR_APART = 600.0  # seconds between the newest calls of ranks without a common call
_AHEAD = 8  # calls that a rank may have queued behind an open one
_NEWEST = (64, 256)  # calls of a rank that are compared: more if the fewer do not decide

Members = tuple[int, ...]


@dataclass(slots=True)
class Job:
    """Ranks whose dumps fit together."""

    ranks: list[int] = field(default_factory=list)
    #: (description, member) -> the members of that group.
    groups: dict[tuple[str, int], Members] = field(default_factory=dict)
    #: (description, number of members) of these groups.
    shapes: set[tuple[str, int]] = field(default_factory=set)
    #: One rank of each set of ranks that ran together.
    together: set[int] = field(default_factory=set)
    #: Why these dumps do not fit to the largest job's.
    reason: str = ""


def jobs(dumps: Mapping[int, Dump]) -> list[Job]:
    """The dumps by job, the largest first. One job unless dumps contradict each other."""
    described = {rank: _described(dump) for rank, dump in dumps.items()}
    times = _Times(dumps)
    found: list[Job] = []
    for rank in sorted(dumps):
        own = described[rank]
        against = [_contradiction(rank, own, job, times) for job in found]
        fitting = [job for job, reason in zip(found, against, strict=True) if not reason]
        shapes = {(desc, len(members)) for desc, members in own.items()}
        job = max(fitting, key=lambda job: len(job.shapes & shapes), default=None)
        if job is None:
            job = Job(reason=next(iter(against), ""))
            found.append(job)
        job.ranks.append(rank)
        job.together.add(times.of(rank))
        job.shapes |= shapes
        for desc, members in own.items():
            if job.groups.get((desc, rank)) is not members:
                job.groups |= {(desc, member): members for member in members}
    found.sort(key=lambda job: -len(job.ranks))
    if len(found) > 1 and not found[1].reason:  # it was the first one that was looked at
        found[1].reason = found[0].reason
    return found


def _described(dump: Dump) -> dict[str, Members]:
    """Members by description, where the process has one group of that description."""
    found: dict[str, list[Members]] = defaultdict(list)
    for own in dump.groups.values():
        if own.desc and own.ranks:
            found[own.desc].append(own.ranks)
    return {desc: several[0] for desc, several in found.items() if len(several) == 1}


def _contradiction(rank: int, own: Mapping[str, Members], job: Job, times: _Times) -> str:
    for desc, members in own.items():
        known = job.groups.get((desc, rank))
        if known is members:
            continue
        if known not in (None, members):
            return f"another configuration of process groups ({desc})"
        if rank not in members:
            return f"its group {desc} does not contain it"
    seconds = max((times.apart(rank, other) for other in job.together), default=0.0)
    return f"its calls were issued {seconds / 60:.0f} minutes apart" if seconds else ""


class _Times:
    """When ranks issued their newest calls. A rank may reach one call minutes after the others (it
    saved a checkpoint), so ranks that issued any call together ran together."""

    def __init__(self, dumps: Mapping[int, Dump]) -> None:
        self.together = {rank: rank for rank in dumps}
        self.seconds: dict[tuple[int, int], float] = {}
        self.apart_sets = len(dumps)  # sets of ranks that are not known to have run together
        issued: list[list[tuple[float, int]]] = []
        for most in _NEWEST:
            issued = _issued(dumps, most)
            if self._unite(issued):
                return
        newest = [
            (dump.created[-1] / 1e9, rank)
            for rank, dump in dumps.items()
            if dump.created and dump.created[-1]
        ]
        common = [_split(times, APART) for times in issued]
        for parts in (*common, _split(newest, FAR_APART)):
            for (at, one), (time, other) in combinations([part[0] for part in parts], 2):
                self._part(one, other, abs(time - at))
        for one, other, seconds in _overtaken(dumps, {rank: at for at, rank in newest}):
            self._part(one, other, seconds)

    def _part(self, one: int, other: int, seconds: float) -> None:
        ends = min(self.of(one), self.of(other)), max(self.of(one), self.of(other))
        if ends[0] != ends[1]:
            self.seconds.setdefault(ends, seconds)

    def _unite(self, issued: list[list[tuple[float, int]]]) -> bool:
        """Puts ranks together that issued a call together; whether that unites all."""
        for times in sorted(issued, key=len, reverse=True):
            for part in _split(times, APART):
                first = self.of(part[0][1])
                for _, rank in part:
                    if (one := self.of(rank)) != first:
                        self.together[one] = first
                        self.apart_sets -= 1
            if self.apart_sets <= 1:
                return True
        return False

    def of(self, rank: int) -> int:
        """The same for ranks that ran together."""
        while self.together[rank] != rank:
            self.together[rank] = self.together[self.together[rank]]
            rank = self.together[rank]
        return rank

    def apart(self, one: int, other: int) -> float:
        """Seconds between their calls; 0 if nothing shows that they did not run together."""
        ends = self.of(one), self.of(other)
        return 0.0 if ends[0] == ends[1] else self.seconds.get((min(ends), max(ends)), 0.0)


def _issued(dumps: Mapping[int, Dump], most: int) -> list[list[tuple[float, int]]]:
    """By call, when which rank issued it; of each rank the newest calls, at most ``most``."""
    issued: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
    numbers: dict[tuple[str, Members], int] = {}  # hashing all members for each call is slow
    for rank, dump in dumps.items():
        of_group = {
            name: numbers.setdefault((own.desc, own.ranks), len(numbers))
            for name, own in dump.groups.items()
            if own.ranks
        }
        of_kind = [of_group.get(kind.group) if kind.peer is None else None for kind in dump.kinds]
        for row in range(max(0, len(dump.kind) - most), len(dump.kind)):
            number = of_kind[dump.kind[row]]
            if number is not None and dump.created[row]:
                issued[number, dump.position[row]].append((dump.created[row] / 1e9, rank))
    return [*issued.values()]


def _overtaken(
    dumps: Mapping[int, Dump], newest: Mapping[int, float]
) -> Iterator[tuple[int, int, float]]:
    """Pairs of ranks that were not in one attempt, with the seconds between their newest calls.

    Calls that need all members completed on the first rank which the second one had not issued
    minutes later: in one attempt they could not have completed."""
    completed: dict[tuple[str, Members], tuple[int, int]] = {}
    issued: dict[tuple[str, Members], tuple[int, int]] = {}
    for rank, dump in dumps.items():
        if rank not in newest or dump.backend == "gloo":  # gloo runs calls side by side
            continue
        for group, (done, made) in _counts(dump).items():
            completed[group] = max(completed.get(group, (done, rank)), (done, rank))
            issued[group] = min(issued.get(group, (made, rank)), (made, rank))
    for group, (done, ahead) in completed.items():
        made, behind = issued[group]
        if done > made + _AHEAD and newest[behind] - newest[ahead] > APART:
            yield ahead, behind, newest[behind] - newest[ahead]


def _counts(dump: Dump) -> dict[tuple[str, Members], tuple[int, int]]:
    """By group, how many calls completed for certain, and how many were issued."""
    found: dict[tuple[str, Members], tuple[int, int]] = {}
    for row in range(max(0, len(dump.kind) - _NEWEST[-1]), len(dump.kind)):
        kind, at = dump.kinds[dump.kind[row]], dump.position[row]
        own = dump.groups.get(kind.group)
        if own is None or kind.peer is not None or not own.ranks:
            continue
        key = own.desc, own.ranks
        done, made = found.get(key, (0, 0))
        # The calls of a group run in order, so those before an open one have completed.
        found[key] = max(done, at + (dump.state[row] == COMPLETED)), max(made, at + 1)
    return found


def _split(times: list[tuple[float, int]], gap: float) -> list[list[tuple[float, int]]]:
    """``times`` cut where more than ``gap`` seconds lie between two neighbours."""
    times.sort()
    parts: list[list[tuple[float, int]]] = []
    for one in times:
        if not parts or one[0] - parts[-1][-1][0] > gap:
            parts.append([])
        parts[-1].append(one)
    return parts


def others(found: Iterable[Job]) -> tuple[str, ...]:
    """A sentence on each job but the first."""
    return tuple(
        f"the dump{'s' if len(job.ranks) > 1 else ''} of {of_ranks(job.ranks)}: "
        f"not of one job or attempt with the other dumps ({job.reason})"
        for job in list(found)[1:]
    )
