"""Jobs on several nodes: ranks of a node that fell silent, and where a culprit runs.

That nothing comes from a node is no proof of anything but that. Its ranks are named only where
every rank that waits does so, directly or through others, for one of them.
"""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts, Judgement
from moediag.diagnosis.words import cause
from moediag.evidence.model import Collective, Evidence, Node
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks


def silent(evidence: Evidence) -> tuple[Node, ...]:
    return tuple(node for node in evidence.nodes if node.silent is not None)


def ranks_of(nodes: tuple[Node, ...]) -> tuple[int, ...]:
    return tuple(sorted(rank for node in nodes for rank in node.ranks))


def stood(facts: Facts, waiting: tuple[int, ...]) -> Judgement:
    """Ranks wait, none that was seen is at fault, and a node is silent."""
    evidence = facts.evidence
    gone = silent(evidence)
    calls = {rank: call for rank in waiting if (call := _open_call(evidence, rank)) is not None}
    explained = _explained(evidence, calls, set(ranks_of(gone)))
    text = f"{_told(gone)} {ranks(waiting).capitalize()} "
    first = next((rank for rank in sorted(calls) if rank in explained), None)
    if first is None:
        return Judgement(
            Verdict.HANG,
            Confidence.LOW,
            f"{text}waited in a collective, and nothing shows that it was for ranks there: this "
            "names nobody.",
        )
    text += "waits" if len(waiting) == 1 else "wait"
    text += f" in {cause.describe(calls[first])} on {_group(evidence, first, calls[first])}, "
    if set(waiting) - explained:
        return Judgement(
            Verdict.HANG,
            Confidence.LOW,
            f"{text}but {ranks(set(waiting) - explained)} for nobody there: this names nobody.",
        )
    text += (
        f"for {ranks(ranks_of(gone))} there: that node is down, cut off or stopped as a whole, and "
        "nothing tells which."
    )
    return Judgement(
        Verdict.HANG,
        Confidence.MEDIUM,
        text,
        culprits=ranks_of(gone),
        victims=tuple(sorted(waiting)),
        what="silent-node",
    )


def lost(facts: Facts, said: str) -> Judgement:
    """All that failed lost a peer, and a node is silent. ``said``: how they put it."""
    gone = silent(facts.evidence)
    failed = tuple(sorted(f.rank for f in facts.failed))
    return Judgement(
        Verdict.CRASH,
        Confidence.MEDIUM,
        f"{ranks(failed).capitalize()} lost the connection to a peer ({said}). {_told(gone)} It "
        "ended with its watcher or was cut off, and nothing tells which.",
        culprits=ranks_of(gone),
        victims=tuple(sorted(set(facts.evidence.ranks) - set(ranks_of(gone)))),
        failure=facts.failed[0],
        what="silent-node",
    )


def where(evidence: Evidence, culprits: tuple[int, ...]) -> str:
    """``Rank 2 runs on node 1 (host b).``, where there are several nodes."""
    on = [n for n in evidence.nodes if n.silent is None and n.name and set(n.ranks) & set(culprits)]
    if len(evidence.nodes) < 2 or not on:
        return ""
    told = []
    for node in on:
        mine = [rank for rank in culprits if rank in node.ranks]
        verb = "runs" if len(mine) == 1 else "run"
        told.append(f"{ranks(mine)} {verb} on {_named(node)}")
    text = ", ".join(told)
    return f" {text[0].upper()}{text[1:]}."


def note(evidence: Evidence) -> tuple[str, ...]:
    """Who is where, for the page."""
    if len(evidence.nodes) < 2:
        return ()
    of = [f"{_named(n) or 'not watched'}: {ranks(n.ranks)}" for n in evidence.nodes]
    return (f"{len(evidence.nodes)} nodes; {'; '.join(of)}",)


def _named(node: Node) -> str:
    host = f" ({node.host})" if node.host and not node.name.startswith("host ") else ""
    return f"{node.name}{host}"


def _told(gone: tuple[Node, ...]) -> str:
    told = []
    for node in gone:
        host = f"{node.host}, " if node.host and not node.name.startswith("host ") else ""
        told.append(
            f"{node.name} ({host}{ranks(node.ranks)}) has sent nothing for {node.silent:.0f} s"
        )
    text = "; ".join(told)
    return f"{text[:1].upper()}{text[1:]}."


def _open_call(evidence: Evidence, rank: int) -> Collective | None:
    seen = evidence.ranks.get(rank)
    calls = seen.collectives if seen is not None else ()
    return next((call for call in reversed(calls) if not call.completed), None)


def _explained(evidence: Evidence, calls: dict[int, Collective], gone: set[int]) -> set[int]:
    """Ranks whose call has a member that is gone, or that itself waits, elsewhere, for one."""
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


def _group(evidence: Evidence, rank: int, call: Collective) -> str:
    group = evidence.ranks[rank].groups.get(call.group)
    return group.label if group is not None else call.group
