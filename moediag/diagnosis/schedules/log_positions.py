"""Where ranks are in their groups, as far as messages of NCCL's watchdog say: no schedule is known.

The watchdog names the first call of a group that did not complete in time, and the last calls that
the rank issued and completed there. In one group these numbers order the ranks. What is concluded:

- a rank that did not issue the call in which others wait is behind, and so is one that waits in an
  earlier call of the group;
- a rank that is behind because it waits in another group is a victim of that group;
- a rank that waits in a call, where another completed a later one, is not: their calls differ;
- equal numbers with different operations or sizes are a mismatch;
- numbers of groups that are not certainly the same are never compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from moediag.diagnosis.schedules.matching import ROOTED
from moediag.evidence.log_formats import meaning
from moediag.evidence.log_reports import group_size
from moediag.evidence.model import Report
from moediag.records import dataclass

_POINT_TO_POINT = frozenset({"send", "recv", "coalesced", "unknown"})
# Seconds between messages of one hang, at least. The next attempt of a job starts after the first
# timeout and needs as long again for the next one.
_APART = 120.0
ATTEMPTS = "the log holds more than one attempt of the job"
FAR_APART = "the messages are too far apart in time"
_UNNAMED = "these lines do not name the group"
_USUAL = 600.0  # seconds, NCCL's timeout if no message tells it

Key = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Position:
    """Where one process is in one group."""

    #: None if the log does not tell it.
    rank: int | None
    #: Its rank in the group, if known.
    place: int | None
    #: The first call that timed out, counted from 1.
    stuck: int | None = None
    issued: int | None = None
    completed: int | None = None
    op: str = ""
    numel_in: int | None = None
    numel_out: int | None = None
    #: Its own watchdog reported a timeout, not that of another rank.
    own: bool = False
    #: It waits in a call whose number the log does not tell (torch before 2.0).
    unnumbered: bool = False
    #: The user's line that made the call, or "".
    site: str = ""

    @property
    def open(self) -> int | None:
        """Its first call that is known to be open."""
        if self.stuck is not None or self.issued is None or self.completed is None:
            return self.stuck
        return self.completed + 1 if self.completed < self.issued else None

    @property
    def call(self) -> tuple[str, int | None, int | None]:
        return self.op, self.numel_in, self.numel_out

    def came_to(self, call: int) -> bool:
        """Whether it may have issued that call."""
        if self.issued is not None:
            return self.issued >= call
        return self.open is None or self.open >= call


@dataclass(frozen=True, slots=True)
class Standing:
    """The known members of one group."""

    #: torch's name; "" if the messages do not tell it.
    group: str
    desc: str
    members: tuple[Position, ...]
    #: The group's size, if a call tells it.
    size: int | None
    #: Why the members' numbers cannot be compared, or "".
    apart: str
    #: The furthest call in which a member waits, or None.
    front: int | None
    #: Members whose first open call is the front.
    waiting: tuple[Position, ...]
    #: Members that did not come to the front, or wait before it.
    behind: tuple[Position, ...]

    @property
    def label(self) -> str:
        return self.desc or (f"group {self.group}" if self.group else "a group that is not named")

    @property
    def ahead(self) -> tuple[Position, ...]:
        """Members on which the front completed."""
        front = self.front
        if front is None or self.apart:
            return ()
        return tuple(
            one for one in self.members if one.completed is not None and one.completed >= front
        )

    @property
    def odd(self) -> tuple[tuple[Position, ...], ...]:
        """The sides of a mismatch at the front, the largest first; () if the calls are equal."""
        known = [one for one in self.waiting if one.op]
        sides = Counter(one.call for one in known)
        if len(sides) < 2 or self.apart:
            return ()
        return tuple(
            tuple(one for one in known if one.call == call) for call, _ in sides.most_common()
        )


@dataclass(frozen=True, slots=True)
class Positions:
    """All groups, and what follows from them."""

    groups: tuple[Standing, ...]
    culprits: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    #: Ranks that are behind in one group because they wait in another: rank -> that group's label.
    elsewhere: Mapping[int, str] | None = None


def positions(reports: Iterable[Report]) -> Positions | None:
    """None without any message of a watchdog about a call."""
    reports = list(reports)
    sites = {one.rank: one.detail for one in reports if one.kind == "site"}
    by_group: dict[str, list[Report]] = {}
    for one in reports:
        if meaning(one).fault == "positions":
            by_group.setdefault(one.group, []).append(one)
    if not by_group:
        return None
    groups = tuple(_standing(name, found, sites) for name, found in by_group.items())
    return _concluded(groups)


def _concluded(groups: tuple[Standing, ...]) -> Positions:
    waits = {
        one.rank: group.label
        for group in groups
        for one in group.waiting
        if one.rank is not None and one.stuck is not None
    }
    behind: set[int] = set()
    elsewhere: dict[int, str] = {}
    victims: set[int] = set()
    for group in groups:
        victims |= {one.rank for one in group.waiting if one.rank is not None}
        for one in group.behind:
            if one.rank is None:
                continue
            if one.rank in waits:
                elsewhere[one.rank] = waits[one.rank]
            elif _certain(one, group):
                behind.add(one.rank)
    odd = {r for group in groups if not group.behind for r in _alone(group)}
    culprits = behind or odd
    victims |= set(elsewhere)
    named = bool(culprits)
    return Positions(
        groups,
        tuple(sorted(culprits)),
        tuple(sorted(victims - culprits)) if named else (),
        elsewhere,
    )


def _certain(one: Position, group: Standing) -> bool:
    """Whether a member that is behind is where the group's wait begins. In a broadcast, a rank that
    was not seen may be the one that it waits for."""
    if one.open is None:
        return True
    if differs(one, group):
        return False
    if one.op not in ROOTED:  # one member may finish these before others came
        return True
    return group.size is not None and len(group.members) >= group.size


def differs(one: Position, group: Standing) -> bool:
    """Whether others completed calls after the one in which a member waits, for which they needed
    it: the calls behind the numbers are not the same."""
    return one.open is not None and group.front is not None and group.front - one.open > 1


def _alone(group: Standing) -> tuple[int, ...]:
    """The one member whose call differs from that of three others or more."""
    if len(group.odd) != 2:
        return ()
    most, other = group.odd
    if len(most) < 3 or len(other) > 1 or other[0].rank is None:
        return ()
    return (other[0].rank,)


def _standing(name: str, found: list[Report], sites: Mapping[int | None, str]) -> Standing:
    members: dict[Key, Position] = {}
    mixed = False
    for one in found:
        key = (one.rank, None) if one.rank is not None else (None, one.place)
        before = members.get(key)
        if before is not None and _went_back(before, one):
            mixed = True
        members[key] = _merged(before or Position(one.rank, one.place), one)
    everyone = tuple(
        replace(one, site=sites.get(one.rank, "") if one.rank is not None else "")
        for one in sorted(
            members.values(), key=lambda one: (one.rank is None, one.rank or 0, one.place or 0)
        )
    )
    desc = next((one.desc for one in found if one.desc), "")
    sizes = {size for one in found if (size := group_size(one))}
    apart = _apart(name, desc, everyone, found)
    apart = ATTEMPTS if mixed else apart
    front = max((one.open for one in everyone if one.open is not None), default=None)
    waiting = tuple(one for one in everyone if front is not None and one.open == front)
    behind: tuple[Position, ...] = ()
    if front is not None:
        behind = tuple(
            one
            for one in everyone
            if (one.open is not None and one.open < front) or not one.came_to(front)
        )
    if behind and not name:
        apart = _UNNAMED
    behind = () if apart else behind
    size = sizes.pop() if len(sizes) == 1 else None
    return Standing(name, desc, everyone, size, apart, front, waiting, behind)


def _merged(before: Position, one: Report) -> Position:
    found = replace(before, place=before.place if before.place is not None else one.place)
    found = replace(found, own=found.own or not one.about)
    if one.kind == "timeout" and one.seq is None and found.stuck is None:
        return replace(found, unnumbered=True, op=found.op or one.op)
    if one.kind != "signal" and one.seq is not None:
        if found.stuck is None or one.seq < found.stuck:
            found = replace(found, stuck=one.seq, op="", numel_in=None, numel_out=None)
        if one.op and one.seq == found.stuck:
            found = replace(found, op=one.op, numel_in=one.numel_in, numel_out=one.numel_out)
    elif one.op and found.stuck is None:  # torch before 1.12 does not tell the number
        found = replace(found, op=one.op)
    if one.issued is not None:
        found = replace(found, issued=max(one.issued, found.issued or 0))
    if one.completed is not None:
        found = replace(found, completed=max(one.completed, found.completed or 0))
    return found


def _went_back(before: Position, one: Report) -> bool:
    """Whether a later message shows an earlier place: another attempt of the same rank."""
    for then, now in ((before.completed, one.completed), (before.issued, one.issued)):
        if then is not None and now is not None and now < then:
            return True
    return before.stuck is not None and one.issued is not None and one.issued < before.stuck


def _apart(name: str, desc: str, members: tuple[Position, ...], found: list[Report]) -> str:
    """Why these may not be members of one group in one attempt of the job; "" if they are."""
    if any(one.op in _POINT_TO_POINT for one in members):
        return "sends and receives have numbers of their own"
    places: dict[int, set[int]] = {}
    for one in members:
        if one.rank is not None and one.place is not None:
            places.setdefault(one.place, set()).add(one.rank)
    if name and any(len(ranks) > 1 for ranks in places.values()):
        return "several groups have this name"
    shared = desc.startswith("mesh_") or ":split:" in desc
    if shared and any(ranks != {place} for place, ranks in places.items()):
        return "groups of a device mesh may share this name"
    owners: dict[int, set[str]] = {}
    for report in found:
        if report.rank is not None and report.process:
            owners.setdefault(report.rank, set()).add(report.process)
    if any(len(processes) > 1 for processes in owners.values()):
        return "several processes have the same rank"
    times = [one.time for one in found if one.time]
    limit = max((one.seconds for one in found if one.kind == "timeout"), default=0.0) or _USUAL
    if times and max(times) - min(times) > max(_APART, limit / 2):
        return FAR_APART
    return ""
