"""Jobs on several nodes: nodes that stopped sending data, and the ranks that wait for theirs.

A silent node proves only that it is silent. Its ranks are named only where every waiting rank
waits for one of them, directly or through others.
"""

from __future__ import annotations

from moediag.evidence.model import Collective, Evidence, Node


def silent(evidence: Evidence) -> tuple[Node, ...]:
    return tuple(node for node in evidence.nodes if node.silent is not None)


def ranks_of(nodes: tuple[Node, ...]) -> tuple[int, ...]:
    return tuple(sorted(rank for node in nodes for rank in node.ranks))


def open_call(evidence: Evidence, rank: int) -> Collective | None:
    seen = evidence.ranks.get(rank)
    calls = seen.collectives if seen is not None else ()
    return next((call for call in reversed(calls) if not call.completed), None)


def explained(evidence: Evidence, calls: dict[int, Collective], gone: set[int]) -> set[int]:
    """Ranks whose call has a member that is gone, or a member that itself waits for one."""
    found: set[int] = set()
    grown = True
    while grown:
        grown = False
        for rank, call in calls.items():
            if rank in found:
                continue
            group = evidence.ranks[rank].groups.get(call.group)
            members = set(group.ranks) if group is not None else set()
            if call.peer is not None:
                members = {call.peer}
            through = {r for r in found & members if _key(calls[r]) != _key(call)}
            if members & gone or through:
                found.add(rank)
                grown = True
    return found


def _key(call: Collective) -> tuple[str, int]:
    return call.group, call.position
