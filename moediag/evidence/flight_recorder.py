"""Flight Recorder dumps of many ranks, as the same evidence that moediag's recorder gives.

Two questions need all dumps: which groups of different processes are the same, and which calls
become objects (:mod:`moediag.evidence.window`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import field

from moediag.evidence import group_rows, window
from moediag.evidence.flight_calls import COMPLETED, STARTED, Dump, Kind
from moediag.evidence.model import (
    COMPLETED_THERE,
    ISSUED,
    STARTED_THERE,
    Collective,
    Group,
    RankEvidence,
)
from moediag.records import dataclass

_FEW = 8  # calls: a job may hang before any of them completes
_MANY = 256  # members
Name = tuple[int, str]  # a rank, and its name of a group


class _Members(tuple[int, ...]):
    """The members of a large group, which are in the keys of many dictionaries: hashed once, as
    Python 3.14 does with every tuple."""

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the dumps say together."""

    #: One for each dump.
    ranks: dict[int, RankEvidence]
    #: At least this many ranks took part.
    world_size: int
    #: Of most dumps.
    backend: str
    #: Calls that did not become objects, because all ranks agree on them.
    left_out: int = 0
    #: The dumps tell which calls completed.
    tracked: bool = True
    #: Ranks whose dump is older than the others', with the proof: the job still moved.
    older: Mapping[int, str] = field(default_factory=dict)
    not_seen: tuple[str, ...] = ()


def own_rank(dump: Dump) -> int | None:
    """The rank that wrote the dump, if its content tells.

    Its place in a send tells it, or that only one rank is in all of its groups.
    """
    for name, place in dump.places.items():
        ranks = dump.groups[name].ranks
        if place < len(ranks):
            return ranks[place]
    used = {kind.group for kind in dump.kinds}
    members = [set(dump.groups[name].ranks) for name in used if dump.groups[name].ranks]
    common = set.intersection(*members) if members else set()
    return common.pop() if len(common) == 1 else None


def recorded(dumps: Mapping[int, Dump], world_size: int = 0) -> Recorded:
    """Evidence from ``dumps`` by rank; there are at least ``world_size`` ranks."""
    world_size = max([world_size, *(rank + 1 for rank in dumps)], default=0)
    lists = {id(own.ranks): own.ranks for d in dumps.values() for own in d.groups.values()}
    world_size = max([world_size, *(max(ranks) + 1 for ranks in lists.values() if ranks)])
    groups = _groups(dumps, world_size)
    lost: list[str] = []
    usable = _without_unaligned(dumps, groups, lost)
    _find_open_only(dumps)
    tracked = any(COMPLETED in dump.state or dump.open_only for dump in dumps.values())
    tracked = tracked or all(len(dump.kind) < _FEW for dump in dumps.values())
    if not tracked:
        lost.append("which calls completed (the dumps do not say)")
    keys = {rank: {n: _key(groups[rank, n]) for n in usable[rank]} for rank in dumps}
    split = group_rows.tracks(dumps, keys)
    reached = group_rows.reached(dumps, split)
    chosen = window.choose(dumps, keys, split, tracked)
    settled = group_rows.settled(dumps, keys, reached)
    ranks = {
        rank: _rank(rank, dump, groups, chosen, settled[rank], lost, tracked)
        for rank, dump in dumps.items()
    }
    backends = Counter(sorted(dump.backend for dump in dumps.values() if dump.backend))
    return Recorded(
        ranks,
        world_size,
        next((backend for backend, _ in backends.most_common(1)), ""),
        left_out=sum(len(d.kind) for d in dumps.values())
        - sum(len(seen.collectives) for seen in ranks.values()),
        older=group_rows.older(dumps, groups, reached) if tracked else {},
        tracked=tracked,
        not_seen=tuple(dict.fromkeys(lost)),
    )


def _rank(
    rank: int,
    dump: Dump,
    groups: Mapping[Name, Group],
    chosen: window.Chosen,
    settled: Mapping[str, int],
    lost: list[str],
    tracked: bool,
) -> RankEvidence:
    not_seen = []
    if dump.contradicts:
        text = f"rank {rank}: its calls (pg_status counts incomplete calls, the dump lists none)"
        return RankEvidence(rank, not_seen=(text,))
    if dump.unreadable:
        not_seen.append(f"rank {rank}: {dump.unreadable} unreadable entries of its dump")
    if not dump.recording:
        not_seen.append(f"rank {rank}: its calls (the dump was taken without them)")
    if dump.backend == "gloo":
        lost.append("sends and receives (the Flight Recorder does not record those of gloo)")
    if not any(kind.site for kind in dump.kinds) and dump.kinds:
        lost.append("lines of code (the dumps hold no stack traces)")
    own = {name: groups[rank, name] for name in dump.groups}
    return RankEvidence(
        rank=rank,
        collectives=tuple(_calls(rank, dump, own, chosen, tracked)),
        groups={group.name: group for group in own.values()},
        versions={dump.backend: dump.library} if dump.library and dump.backend else {},
        not_seen=tuple(not_seen),
        counts_apart=True,
        settled=settled,
        open_only=dump.open_only,
    )


def _find_open_only(dumps: Mapping[int, Dump]) -> None:
    """Marks dumps that left completed calls out. A ring buffer that has wrapped is full, so rings
    of one job then have one length."""
    late = [d for d in dumps.values() if d.wrapped and COMPLETED not in d.state]
    if len({len(dump.kind) for dump in late}) > 1:
        for dump in late:
            dump.open_only = True


def _calls(
    rank: int, dump: Dump, own: Mapping[str, Group], chosen: window.Chosen, tracked: bool
) -> Iterator[Collective]:
    done = chosen.done[rank]
    for row in chosen.rows[rank]:
        kind = dump.kinds[dump.kind[row]]
        group = own[kind.group]
        yield Collective(
            index=dump.index[row],
            group=group.name,
            position=dump.position[row],
            op=kind.op,
            numel_in=kind.numel_in,
            numel_out=kind.numel_out,
            dtype=kind.dtype,
            peer=_peer(kind, group),
            site=kind.site,
            completed=bool(done[row]),
            time=dump.created[row] / 1e9,
            asynchronous=True,
            started=dump.state[row] >= STARTED,
            on_device=_on_device(dump, row, bool(done[row])) if tracked else "",
            parts_unknown=kind.op == "all_to_all",
        )


def _on_device(dump: Dump, row: int, done: bool) -> str:
    if dump.backend == "gloo":
        return ""
    return COMPLETED_THERE if done else STARTED_THERE if dump.state[row] >= STARTED else ISSUED


def _peer(kind: Kind, group: Group) -> int | None:
    """The other end of a send or receive, as a rank of the world."""
    if kind.peer is None or kind.op not in group_rows.P2P or kind.peer >= len(group.ranks):
        return None
    return group.ranks[kind.peer]


# ------------------------------------------------------------------------ groups


def _groups(dumps: Mapping[int, Dump], world_size: int) -> dict[Name, Group]:
    """Each process's groups under names that all processes share.

    A group is identified by its members and description. Several groups with the same ones are
    distinguished by name, or by order of creation if processes number them differently. If the
    members are unknown (gloo), the name identifies the group: there all processes number alike.
    """
    everyone = tuple(range(world_size))
    alike: dict[tuple[tuple[int, ...], str], dict[int, list[str]]] = defaultdict(dict)
    callers: dict[tuple[str, str], list[int]] = defaultdict(list)
    found: dict[Name, Group] = {}
    for rank, dump in dumps.items():
        for name, own in dump.groups.items():
            ranks = own.ranks or (everyone if own.desc == "default_pg" else ())
            if ranks:
                alike[ranks, own.desc].setdefault(rank, []).append(name)
            else:
                callers[name, own.desc].append(rank)
    for (name, desc), who in callers.items():
        for rank in who:
            group = Group(name, tuple(sorted(who)), _axis(desc), desc, dumps[rank].backend)
            found[rank, name] = group
    for (members, desc), of_rank in alike.items():
        ranks = _Members(members) if len(members) > _MANY else members
        for names in of_rank.values():
            names.sort(key=lambda name: (len(name), name))
        lists = list(of_rank.values())
        by_order = any(names != lists[0] for names in lists) and len({*map(len, lists)}) == 1
        first = min(of_rank)
        label = "world" if desc == "default_pg" else desc
        for rank, names in of_rank.items():
            for place, name in enumerate(names):
                shared = f"{of_rank[first][place]}@{first}" if by_order else name
                backend = dumps[rank].backend
                found[rank, name] = Group(shared, ranks, _axis(desc), label, backend)
    return found


def _key(group: Group) -> group_rows.Key:
    return group.name, group.ranks


def _axis(desc: str) -> str | None:
    """A DeviceMesh describes its groups as ``mesh_tp``."""
    return desc.removeprefix("mesh_") if desc.startswith("mesh_") else None


def _without_unaligned(
    dumps: Mapping[int, Dump], groups: Mapping[Name, Group], lost: list[str]
) -> dict[int, frozenset[str]]:
    """By rank, the names of the groups whose collectives have usable positions.

    Once the ring buffer has wrapped, it is unknown how many batches of sends an older release
    counted as collectives.
    """
    batched = {_key(groups[rank, name]) for rank, dump in dumps.items() for name in dump.batched}
    usable = {}
    for rank, dump in dumps.items():
        bad = set()
        if dump.wrapped and batched:
            bad = {name for name in dump.groups if _key(groups[rank, name]) in batched}
        lost += (
            f"rank {rank}: collectives on {groups[rank, name].label} (this torch numbers them "
            "together with sends and receives, and the first ones were overwritten)"
            for name in sorted(bad)
        )
        usable[rank] = frozenset(dump.groups) - bad
    return usable
