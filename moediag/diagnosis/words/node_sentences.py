"""Sentences about nodes: where a culprit runs, and nodes that stopped sending data."""

from __future__ import annotations

from moediag.evidence.model import Evidence, Node
from moediag.result.wording import capital, does, ranks


def where(evidence: Evidence, culprits: tuple[int, ...]) -> str:
    """``Rank 2 runs on node 1 (host b).``, where there are several nodes."""
    on = [n for n in evidence.nodes if n.silent is None and n.name and set(n.ranks) & set(culprits)]
    if len(evidence.nodes) < 2 or not on:
        return ""
    told = (
        does([r for r in culprits if r in node.ranks], f"runs on {_named(node)}") for node in on
    )
    return f" {capital(', '.join(told))}."


def note(evidence: Evidence) -> tuple[str, ...]:
    """Which ranks run on which node, for the page."""
    if len(evidence.nodes) < 2:
        return ()
    of = [f"{_named(n) or 'not watched'}: {ranks(n.ranks)}" for n in evidence.nodes]
    # Ranks that are not watched may be anywhere, or not have been started.
    known = all(node.name for node in evidence.nodes)
    return ("; ".join([f"{len(evidence.nodes)} nodes"] * known + of),)


def _named(node: Node) -> str:
    known = node.name == node.host or node.name.startswith("host ")
    host = f" ({node.host})" if node.host and not known else ""
    return f"{node.name}{host}"


def see_node(gone: tuple[Node, ...]) -> str:
    """What to look at on nodes that are silent."""
    named = ", ".join(map(_named, gone))
    return (
        f"See whether {named} is up and reachable: the scheduler's messages, the kernel's log "
        "(Xid, out of memory, links), the network to the other nodes."
    )


def silence(gone: tuple[Node, ...]) -> str:
    told = []
    for node in gone:
        host = f"{node.host}, " if node.host and not node.name.startswith("host ") else ""
        told.append(
            f"{node.name} ({host}{ranks(node.ranks)}) has sent nothing for {node.silent:.0f} s"
        )
    return f"{capital('; '.join(told))}."
