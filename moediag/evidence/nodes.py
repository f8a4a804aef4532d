"""A job on several nodes: merges the evidence of each node into that of the whole job.

Each node's watcher writes a folder of its own; what it received from other nodes is in folders
below it. The nodes' clocks may differ by any amount. Across nodes only calls are compared; where
times are needed, the clocks are first aligned by the calls that both nodes made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from moediag import protocol
from moediag.evidence import attached_job, looks
from moediag.evidence.model import Evidence, Node, RankEvidence, Stall
from moediag.records import dataclass
from moediag.result.wording import ranks as of_ranks

SCHEMA_VERSION = 1
_SKEW = 1.0  # seconds; a smaller offset may also be one rank that is slower than another


@dataclass(frozen=True, slots=True)
class Part:
    """What one node recorded."""

    evidence: Evidence
    #: All nodes that its watcher knew, itself first.
    nodes: tuple[Node, ...] = ()


def read_nodes(folder: Path) -> tuple[tuple[Node, ...], tuple[Path, ...]]:
    """The nodes that the watcher of ``folder`` knew, and the folders that it received from them.

    Itself first; empty if it knew no other node.
    """
    raw = _json(folder / protocol.NODES_FILE)
    if raw.get("schema_version") != SCHEMA_VERSION:
        return (), ()
    nodes, places = [], []
    for one in raw.get("nodes") or ():
        with suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
            silent = one["silent"]
            node = Node(
                str(one["name"]), str(one["host"]), tuple(sorted(int(r) for r in one["ranks"])),
                None if silent is None else float(silent), bool(one["seen"]),
            )  # fmt: skip
            nodes.append(node)
            place = folder / protocol.NODES_FOLDER / Path(str(one["key"]) or ".").name
            if len(nodes) > 1 and node.seen and place.name and place.is_dir():
                places.append(place)
    return tuple(nodes), tuple(places)


def job_of(folder: Path) -> str:
    """The token shared by all folders of one start of a job, or ""."""
    for path in sorted(folder.glob("rank-*.job.json")):
        if token := str(_json(path).get("job", "")):
            return token
    return ""


def merged(parts: Sequence[Part]) -> Evidence:
    """The whole job. This node's part comes first; a node that is there twice counts once."""
    nodes = _nodes(parts)
    of_node = {rank: at for at, node in enumerate(nodes) for rank in node.ranks}
    ranks: dict[int, RankEvidence] = {}
    for part in parts:
        for rank, seen in part.evidence.ranks.items():
            if rank not in ranks or _content(seen) > _content(ranks[rank]):
                ranks[rank] = seen
    ranks = _one_clock({r: ranks[r] for r in sorted(ranks)}, of_node)
    first = parts[0].evidence
    every = [part.evidence for part in parts]
    kills = [e.oom_kills for e in every if e.oom_kills is not None]
    lost = tuple(dict.fromkeys(text for e in every for text in e.not_seen))
    deaths = dict.fromkeys(rank for e in every for rank in e.deaths)
    looked = looks.merged(e.looks for e in every)
    stall = _stall([e.stall for e in every if e.stall is not None], ranks)
    if looked is not None and not any(seen.collectives for seen in ranks.values()):
        stall = attached_job.stall_of(looked)
    return replace(
        first,
        world_size=max(e.world_size for e in every),
        ranks=ranks,
        backend=next((e.backend for e in every if e.backend), ""),
        stall=stall,
        looks=looked,
        timed_out=any(e.timed_out for e in every),
        interrupted=all(e.interrupted for e in every),
        launch_error=first.launch_error if not any(e.deaths for e in every) else "",
        # Of deaths on several nodes, the first rank is the one that got least far.
        deaths=tuple(
            sorted(deaths, key=lambda r: (ranks[r].last_step, len(ranks[r].collectives), r))
        ),
        not_seen=lost + _not_seen(nodes, ranks),
        oom_kills=sum(kills) if kills else None,
        nodes=nodes,
        sources={path: text for e in reversed(every) for path, text in e.sources.items()},
    )


def _nodes(parts: Sequence[Part]) -> tuple[Node, ...]:
    """The nodes whose own folders are here, then the others that these knew of.

    A node that was silent for the others stays marked as silent, though its folder was found later.
    """
    told = [node for part in parts for node in part.nodes[1:]]
    silent = {n.ranks: n.silent for n in told if n.silent is not None}
    found: list[Node] = []
    placed: set[int] = set()
    for node in [part.nodes[0] for part in parts if part.nodes]:
        found.append(replace(node, seen=True, silent=silent.get(node.ranks)))
        placed |= set(node.ranks)
    for node in told:
        left = tuple(rank for rank in node.ranks if rank not in placed)
        if left:
            found.append(replace(node, ranks=left))
            placed |= set(left)
    return tuple(sorted(found, key=lambda node: node.ranks))


def _stall(stalls: Sequence[Stall], ranks: Mapping[int, RankEvidence]) -> Stall | None:
    """One stall of all nodes: a rank waits if any node says so.

    For ranks on nodes that saw no stall, their own logs decide: the last call, or elsewhere.
    """
    if not stalls:
        return None
    waiting = {rank for stall in stalls for rank in stall.waiting}
    elsewhere = {rank for stall in stalls for rank in stall.elsewhere} - waiting
    for rank in ranks.keys() - waiting - elsewhere:
        seen = ranks[rank]
        if seen.collectives and not seen.finished:
            last = seen.collectives[-1]
            (elsewhere if last.completed or last.asynchronous else waiting).add(rank)
    return replace(stalls[0], waiting=tuple(sorted(waiting)), elsewhere=tuple(sorted(elsewhere)))


def _not_seen(nodes: Iterable[Node], ranks: Mapping[int, RankEvidence]) -> tuple[str, ...]:
    found = []
    for node in nodes:
        if node.silent is None and node.seen:
            continue
        if any(_content(ranks[r]) for r in node.ranks if r in ranks):
            continue
        who = of_ranks(node.ranks) if node.ranks else "its ranks"
        if node.silent is not None:
            found.append(
                f"{node.name} ({who}): sent nothing for {node.silent:.0f} s, so it is not known "
                "what its ranks did or how they ended"
            )
        elif node.name:
            found.append(f"{node.name} ({who}): no evidence received")
        else:
            found.append(f"{who}: no watcher sent anything (moediag watch --shared on its node)")
    return tuple(found)


def _content(seen: RankEvidence) -> int:
    """How much is known of the rank; 0 for nothing."""
    told = (seen.error, seen.exit, seen.stacks, seen.versions, seen.groups)
    return len(seen.collectives) + sum(map(bool, told))


# ------------------------------------------------------------------------ clocks


def _one_clock(
    ranks: Mapping[int, RankEvidence], of_node: Mapping[int, int]
) -> dict[int, RankEvidence]:
    """All times converted to the clock of the first node, to within about one step.

    Calls of the same group and position are taken to be issued at the same time.
    """
    from statistics import median  # it takes longer to import than this module

    issued: dict[int, dict[tuple[str, int], float]] = {}
    for rank, seen in ranks.items():
        of = issued.setdefault(of_node.get(rank, 0), {})
        for call in seen.collectives:
            if call.peer is None and call.time > 0:
                of[call.group, call.position] = call.time
    base = issued.get(0, {})
    moved = dict(ranks)
    for node, of in issued.items():
        both = [base[at] - time for at, time in of.items() if at in base]
        offset = median(both) if node and both else 0.0
        if abs(offset) > _SKEW:
            for rank, seen in ranks.items():
                if of_node.get(rank, 0) == node:
                    moved[rank] = _shifted(seen, offset)
    return moved


def _shifted(seen: RankEvidence, by: float) -> RankEvidence:
    def at(time: float) -> float:
        return time + by if time > 0 else time

    error = seen.error
    return replace(
        seen,
        collectives=tuple(replace(call, time=at(call.time)) for call in seen.collectives),
        decisions=tuple(replace(one, time=at(one.time)) for one in seen.decisions),
        error=replace(error, time=at(error.time)) if error else None,
    )


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        raw = protocol.read_json(path, "replace")
        return raw if isinstance(raw, dict) else {}
    return {}
