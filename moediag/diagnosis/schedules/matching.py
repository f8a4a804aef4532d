"""Checks whether the calls at one position of a group's schedule match.

What must be equal depends on the operation: an uneven all-gather is legal, an uneven all-reduce is
not. All-to-all pairs what rank i sends to j with what j expects from i. An unknown value (None, an
empty dtype) is not an empty one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moediag.evidence.model import Collective

Calls = Mapping[int, Collective]  # by rank

ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})

# Kinds of divergence, by priority. Only ``parameters`` is silent: the same bytes travel, with
# another meaning.
KINDS = ("op", "members", "size", "splits", "dtype", "reduce", "root", "parameters")


def key(call: Collective) -> tuple[Any, ...]:
    """A key: calls with equal keys match, unless they carry splits. This is the fast path."""
    return (
        call.op,
        call.numel_in,
        call.numel_out,
        call.dtype,
        call.parameters,
        call.reduce,
        call.peer,
        call.members,
        call.splits_in,
        call.splits_out,
    )


def wire_numel(call: Collective) -> int:
    """Elements on the wire: the full tensor for all_gather and reduce_scatter alike."""
    if call.op in ("all_gather", "recv", "scatter"):
        return call.numel_out or call.numel_in
    return call.numel_in or call.numel_out


_VIEWS: dict[str, Callable[[Collective], Any]] = {
    "op": lambda c: c.op or None,
    "members": lambda c: c.members,
    "size": lambda c: None if c.op in ("", "barrier", "all_to_all") else wire_numel(c),
    "dtype": lambda c: None if c.op == "barrier" else c.dtype or None,
    "reduce": lambda c: c.reduce,
    "root": lambda c: c.peer if c.op in ROOTED else None,
    "parameters": lambda c: c.parameters,
}


def view(kind: str) -> Callable[[Collective], Any]:
    """The part of a call that must be equal for ``kind``; None where unknown or irrelevant."""
    return _VIEWS.get(kind, key)


def differs(calls: Calls, order: tuple[int, ...]) -> str | None:
    """The first of KINDS in which these calls do not match, or None. ``order``: the ranks of the
    group in group order, which splits refer to."""
    for kind in KINDS:
        if kind == "splits":
            if mismatched_pairs(calls, order) or _totals_disagree(calls, order):
                return kind
            continue
        values = {value for call in calls.values() if (value := _VIEWS[kind](call)) is not None}
        if kind == "members" and not _members_disagree(calls):
            continue
        if len(values) > 1:
            return kind
        if kind == "size" and _parts_disagree(calls):
            return kind
    return None


def _members_disagree(calls: Calls) -> bool:
    """Whether a rank makes a group with another that makes a different one meanwhile. Ranks that
    only make groups of their own, side by side, do not wait for each other."""
    made = {rank: call.members for rank, call in calls.items() if call.members is not None}
    return any(made.get(r, own) != own for rank, own in made.items() if rank in own for r in own)


def _parts_disagree(calls: Calls) -> bool:
    """Whether the ranks' parts differ and do not add up to the whole (which is equal)."""
    some = next(iter(calls.values()))
    if some.op == "all_gather":
        parts = [call.numel_in for call in calls.values()]
    elif some.op == "reduce_scatter":
        parts = [call.numel_out for call in calls.values()]
    else:
        return False
    return len(set(parts)) > 1 and sum(parts) != wire_numel(some)


def mismatched_pairs(calls: Calls, order: tuple[int, ...]) -> list[tuple[int, int]]:
    """Pairs (i, j) where i does not send to j the elements that j expects from i."""
    if not calls or any(call.op != "all_to_all" for call in calls.values()):
        return []
    known = {rank: c for rank, c in calls.items() if not c.parts_unknown}
    sent = {rank: _elements(c.splits_in, c.numel_in, len(order)) for rank, c in known.items()}
    wanted = {rank: _elements(c.splits_out, c.numel_out, len(order)) for rank, c in known.items()}
    pairs = []
    for i, sender in enumerate(order):
        row = sent.get(sender)
        if row is None:
            continue
        for j, receiver in enumerate(order):
            column = wanted.get(receiver)
            if column is not None and row[j] != column[i]:
                pairs.append((sender, receiver))
    return pairs


def _totals_disagree(calls: Calls, order: tuple[int, ...]) -> bool:
    """Whether the totals sent and expected differ, where the parts are unknown."""
    if set(calls) != set(order) or any(c.op != "all_to_all" for c in calls.values()):
        return False
    sent, expected = (
        sum(c.numel_in for c in calls.values()),
        sum(c.numel_out for c in calls.values()),
    )
    return any(c.parts_unknown for c in calls.values()) and sent != expected


def _elements(splits: tuple[int, ...] | None, numel: int, world: int) -> list[int] | None:
    """Elements for each rank of the group; None when unknown. Splits count rows (of one tensor)
    or elements (of a list of tensors): their share of ``numel`` is right for both."""
    if not splits:
        return [numel // world] * world if numel % world == 0 else None
    total = sum(splits)
    if len(splits) != world:
        return None
    if total == 0 or numel % total:
        return [0] * world if numel == 0 else None
    row = numel // total
    return [part * row for part in splits]
