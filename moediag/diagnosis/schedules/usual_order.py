"""Finds ranks that depart from what the job usually does, where no majority opposes them.

Two calls that meet and differ do not show which of them is wrong. Two facts may:

- **Peers.** Other ranks made the same calls in the same order. If at least two of them then made
  another call, and none made this rank's, this rank departed. This is a majority of the ranks with
  the same role, whichever groups they are in.
- **A period.** The two calls have always alternated in one rhythm: ``a`` after every N calls of
  ``b``, at least three times. A rank that makes ``b`` once more left ``a`` out.

The second is weak, because a program may do something for the first time: the first evaluation
of a job is new on every rank, and a rank that skips it does what it always did. So a call that was
never made before names no rank, and neither does one whose rhythm varied or that came early.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from moediag.diagnosis.schedules.align import POINT_TO_POINT, further
from moediag.diagnosis.schedules.matching import wire_numel
from moediag.evidence.model import Collective, Evidence, Group, RankEvidence
from moediag.protocol import natural
from moediag.records import dataclass

SHARED = 6  # calls before, equal on ranks that go the same way
SEEN_OFTEN = 3
MOST_CALLS = 250_000  # of all ranks together


@dataclass(frozen=True, slots=True)
class Departure:
    """One departure from the usual order."""

    rank: int
    call: Collective  # the call of ``rank`` that departs
    usual: Collective  # the call that was usual there
    peers: tuple[int, ...] = ()
    """The ranks that went the same way and made the usual call there; () if the past shows it."""
    every: int = 0
    """For a period: how many calls of the one kind usually came before one of the other."""
    after: int = 0
    """For a period: after how many of them the rank made ``call``."""
    line: bool = False
    """``peers`` made the usual call in the same line, perhaps after other calls."""

    @property
    def early(self) -> bool:
        """The rank made a rare call before it was due. That shows who did something unusual, not
        who is wrong: the call may have another trigger, such as the end of an epoch."""
        return 0 < self.after < self.every


def departures(
    calls: Mapping[int, Collective | None], evidence: Evidence, alone: bool = False
) -> tuple[Departure, ...]:
    """Departures of the ranks that made one of ``calls``; () where none departs, or all do.
    ``alone``: their opponents were not seen or do not count, so all may depart."""
    sides = {rank: call for rank, call in calls.items() if call is not None}
    tracks, examples = _tracks(evidence, sides)
    found = []
    for rank, call in sorted(sides.items()):
        one = _from_peers(rank, call, tracks, examples)
        if one is not None:
            found.append(one)
    if not found and not alone:
        ways = (_from_line, _from_period)
        found = next(filter(None, (way(sides, tracks) for way in ways)), [])
    return tuple(found) if 0 < len(found) < len(sides) or alone else ()


def others_departed(
    calls: Mapping[int, Collective | None], few: Sequence[int], evidence: Evidence
) -> bool:
    """Whether the ranks ``few`` made the calls of their steps before again, and all other ranks of
    ``calls`` did not."""
    sides = {rank: call for rank, call in calls.items() if call is not None}
    tracks, _ = _tracks(evidence, sides)
    kept = {rank: _keeps_its_steps(tracks[rank]) for rank in sides}
    others = [same for rank, same in kept.items() if rank not in few]
    every = bool(others) and all(same is False for same in others)
    return every and all(kept.get(rank) for rank in few)


def departed(
    calls: Mapping[int, Collective | None], evidence: Evidence, alone: bool = False
) -> tuple[int, ...]:
    """The ranks of :func:`departures`."""
    return tuple(one.rank for one in departures(calls, evidence, alone))


# ------------------------------------------------------------------------ the calls as numbers


@dataclass(frozen=True, slots=True)
class _Track:
    """The calls of one rank, each as a number that equal calls of all ranks share."""

    calls: Sequence[Collective]
    tokens: list[int]

    @property
    def first(self) -> int:
        """The index of the first call; earlier ones are lost."""
        return self.calls[0].index if self.calls else 0

    def at(self, index: int) -> int:
        """The place of the call with that index; indices may have gaps after it."""
        place = min(index - self.first, len(self.calls) - 1)
        while place >= 0 and self.calls[place].index > index:
            place -= 1
        return place


def _tracks(
    evidence: Evidence, sides: Mapping[int, Any]
) -> tuple[dict[int, _Track], dict[int, Collective]]:
    """The ranks' calls, those of ``sides`` first, and an example call for each number."""
    numbers: dict[tuple[Any, ...], int] = {}
    examples: dict[int, Collective] = {}
    tracks: dict[int, _Track] = {}
    roles = _roles(evidence)
    rings = _rings(evidence)
    total = 0
    for rank in (*sides, *(rank for rank in sorted(evidence.ranks) if rank not in sides)):
        seen = evidence.ranks[rank]
        total += len(seen.collectives)
        if total > MOST_CALLS and rank not in sides:
            break
        own: list[int] = []
        for call in seen.collectives:
            toward = 0 if call.peer is None else 1 if call.peer > rank else -1
            if toward and call.statement in rings:
                toward = further(seen.groups[call.group], rank, call.peer or 0)
            sizes = () if call.op == "all_to_all" else (call.numel_in, call.numel_out)
            group = roles.get((rank, call.group), call.group)
            key = (group, call.op, sizes, call.dtype, toward, call.place)
            number = numbers.setdefault(key, len(numbers) + 1)
            own.append(number)
            examples.setdefault(number, call)
        tracks[rank] = _Track(seen.collectives, own)
    return tracks, examples


def _rings(evidence: Evidence) -> set[object]:
    """The lines in which all ranks of a group, but one perhaps, send to or receive from the rank
    that is equally far from them, around the end of the group."""
    lines: dict[object, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    size: dict[object, int] = {}
    for rank, seen in evidence.ranks.items():
        for call in seen.collectives:
            group = seen.groups.get(call.group)
            if call.op not in POINT_TO_POINT or group is None or call.peer not in group.ranks:
                continue
            lines[call.statement][rank].add(further(group, rank, call.peer or 0))
            size[call.statement] = len(group.ranks)
    found = set()
    for place, by_rank in lines.items():
        usual, times = Counter(map(frozenset, by_rank.values())).most_common(1)[0]
        if len(by_rank) == size[place] > 2 and len(usual) == 1 and times >= size[place] - 1:
            found.add(place)
    return found


def _roles(evidence: Evidence) -> dict[tuple[int, str], Any]:
    """What a group is for its members, equal for groups of the same kind elsewhere in the mesh.

    A group without an axis or a description has the number that it has among those of its size on
    each of its members, in order of creation; if they disagree, or number their groups in another
    way, it is a kind of its own.
    """
    found: dict[tuple[int, str], Any] = {}
    claimed: dict[tuple[str, tuple[int, ...]], set[Any]] = defaultdict(set)
    for rank, seen in evidence.ranks.items():
        for group in seen.groups.values():
            if not _nameless(group):
                found[rank, group.name] = (group.axis or group.desc, len(group.ranks))
            else:
                claimed[group.name, group.ranks].add(_ordinal(group, seen))
    for rank, seen in evidence.ranks.items():
        for group in filter(_nameless, seen.groups.values()):
            key = group.name, group.ranks
            (role, *others) = claimed[key]
            known = not others and role is not None
            found[rank, group.name] = (role, len(group.ranks)) if known else key
    return found


def _nameless(group: Group) -> bool:
    return not group.axis and group.desc in ("", "undefined")


def _ordinal(group: Group, seen: RankEvidence) -> int | None:
    """Its place among this rank's groups without a name; None if their names are no numbers."""
    numbers = {
        g.name: natural(g.name)
        for g in seen.groups.values()
        if _nameless(g) and len(g.ranks) == len(group.ranks)
    }
    if None in numbers.values():
        return None
    return sorted(numbers, key=lambda name: numbers[name] or 0).index(group.name)


# ------------------------------------------------------------------------ what peers did


def _from_peers(
    rank: int, call: Collective, tracks: Mapping[int, _Track], examples: Mapping[int, Collective]
) -> Departure | None:
    """The first place up to ``call`` where at least two ranks that went the same way until there
    continue alike, but not as ``rank`` does, and none continues as it does."""
    own = tracks[rank]
    last = own.at(call.index)
    ways: dict[int, dict[int, int]] = defaultdict(dict)  # place -> rank -> the call it makes there
    farther: list[int] = []  # how far each rank that agrees goes the same way
    for other, track in tracks.items():
        if other == rank:
            continue
        shared, ends = _parts(own, track, last)
        if shared < SHARED:
            continue
        if ends is not None:
            ways[ends[0]][other] = ends[1]
        farther.append(last + 1 if ends is None else ends[0])
    for place, those in sorted(ways.items()):
        usual, times = Counter(those.values()).most_common(1)[0]
        with_it = sum(reached > place for reached in farther)
        if times < 2 or with_it or times < len(those):
            continue
        if not (_in_a_loop(own, place) or (times > 2 and _again(own, place, examples[usual]))):
            continue
        return Departure(rank, own.calls[place], examples[usual], tuple(sorted(those)))
    return None


def _parts(own: _Track, other: _Track, last: int) -> tuple[int, tuple[int, int] | None]:
    """(number of calls that both made alike, up to where they part; that place of ``own`` and what
    the other made there). None where they do not part up to place ``last``, as far as both go."""
    begin = max(own.first, other.first)
    mine, theirs = begin - own.first, begin - other.first
    length = min(last + 1 - mine, len(other.tokens) - theirs)
    if length <= 0:
        return 0, None
    low, high = 0, length  # the first `low` are equal
    a, b = own.tokens, other.tokens
    if a[mine : mine + length] == b[theirs : theirs + length]:
        return (length, None) if mine + length > last else (0, None)  # it has not come so far
    while low < high:
        middle = (low + high + 1) // 2
        if a[mine + low : mine + middle] == b[theirs + low : theirs + middle]:
            low = middle
        else:
            high = middle - 1
    return low, (mine + low, b[theirs + low])


def _in_a_loop(own: _Track, place: int) -> bool:
    """Whether the calls before ``place`` were made before in this order, so that the ranks with
    the same past have the same role. At the first time, roles may part there."""
    before = own.tokens[place - SHARED : place]
    for end in range(SHARED, place):
        if own.tokens[end - 1] == before[-1] and own.tokens[end - SHARED : end] == before:
            return True
    return False


def _again(own: _Track, place: int, usual: Collective) -> bool:
    """Whether the rank repeats a send or receive that all made before, without the collective that
    the others made after it."""
    sends = own.calls[place].op in POINT_TO_POINT and usual.op not in POINT_TO_POINT
    return sends and own.tokens[place] in own.tokens[max(0, place - SHARED) : place]


# ------------------------------------------------------------------------ what a line fits


def _from_line(sides: Mapping[int, Collective], tracks: Mapping[int, _Track]) -> list[Departure]:
    """Of a send and its receive, the one whose line has only ever fitted the other on at least two
    ranks that are neither."""
    if sorted(call.op for call in sides.values()) != ["recv", "send"]:
        return []
    found = []
    for (rank, call), fits in zip(sides.items(), [*sides.values()][::-1], strict=True):
        made = {
            other: [c for c in track.calls if (c.op, c.site) == (call.op, call.site)]
            for other, track in tracks.items()
            if other not in sides and call.site
        }
        peers = tuple(other for other, calls in made.items() if calls)
        usual = [c for calls in made.values() for c in calls]
        if len(peers) > 1 and {*map(_passed, usual)} == {_passed(fits)}:
            found.append(Departure(rank, call, usual[0], peers, line=True))
    return found


def _passed(call: Collective) -> tuple[int, str]:
    return wire_numel(call), call.dtype


# ------------------------------------------------------------------------ what came every N calls


def _from_period(sides: Mapping[int, Collective], tracks: Mapping[int, _Track]) -> list[Departure]:
    """The ranks that break the rhythm of two calls, if all others keep it."""
    tokens = {rank: tracks[rank].tokens[tracks[rank].at(c.index)] for rank, c in sides.items()}
    kinds = set(tokens.values())
    if len(kinds) != 2:
        return []
    found = []
    for rank, call in sorted(sides.items()):
        other = next(r for r in sides if tokens[r] != tokens[rank])
        track = tracks[rank]
        past = [token for token in track.tokens[: track.at(call.index)] if token in kinds]
        beat = _beat(past, tokens[rank])
        if beat is None:
            return []
        breaks, every, after = beat
        if breaks:
            found.append(Departure(rank, call, sides[other], every=every, after=after))
    return found


def _beat(past: Sequence[int], now: int) -> tuple[bool, int, int] | None:
    """(whether call ``now`` breaks the rhythm of ``past``, how many calls of the one kind usually
    came between two of the other, how many came now). None if there is no constant rhythm."""
    runs: list[list[int]] = []  # [kind, length]
    for kind in past:
        if runs and runs[-1][0] == kind:
            runs[-1][1] += 1
        else:
            runs.append([kind, 1])
    if not runs:
        return None
    kind, length = runs[-1]
    # The first run may have begun before, or with another offset.
    whole = [n for k, n in runs[1:-1] if k == kind]
    if len(whole) < SEEN_OFTEN or len(set(whole)) > 1 or length > whole[0]:
        return None
    every = whole[0]
    if now == kind:
        return length + 1 > every, every, length + 1
    return length != every, every, length


def _keeps_its_steps(track: _Track) -> bool | None:
    """Whether the calls of a step were those of each of the steps before; None if there is no such
    habit, or one was never made in these steps."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, call in enumerate(track.calls):
        places[call.step].append(place)
    steps = [places[step] for step in sorted(places)]
    habit = False
    for at in range(max(SEEN_OFTEN, len(steps) - 2), len(steps)):
        before = [[track.tokens[p] for p in steps[n]] for n in range(at - SEEN_OFTEN, at)]
        usual = before[0]
        habit = all(one == usual for one in before)
        if not habit:
            continue
        # The first call of the next step follows the last one, if the rank came there.
        following = steps[at + 1][:1] if at + 1 < len(steps) else []
        for n, place in enumerate([*steps[at], *following]):
            ends = n >= len(usual)
            if track.tokens[place] == usual[0 if ends else n] and (not ends or place in following):
                continue
            return False if track.tokens[place] in usual else None
    return True if habit else None
