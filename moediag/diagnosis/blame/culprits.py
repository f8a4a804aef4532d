"""Determines which ranks diverged: by what they did, else by a majority, else undecided.

The first rule that applies names these ranks:

1. ranks that ended, raised or are elsewhere while others wait for their call;
2. ranks that left out parameters of an FSDP group that others carry;
3. ranks that sent no token to the expert whose parameters only the others carry;
4. ranks outside a strict majority that agrees (for splits: the one rank in all bad pairs);
5. ranks that depart from what at least two others with the same role did at the same place
   (:func:`by_usual_order`);
6. ranks that depart from what the job always did before, which is a hint only;
7. in a watched job: the rank for which the program has a branch of its own there
   (:mod:`standings`).

Otherwise no rank is named. Rules 1-3 may name a majority, and the contradiction is noted: three
ranks that starve an expert are not victims of the one that does not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from moediag.diagnosis.numbers import agreement
from moediag.diagnosis.schedules import matching
from moediag.diagnosis.schedules.diverge import Divergence, earliest
from moediag.diagnosis.schedules.starvation import Starved, Tokens, experts_of
from moediag.diagnosis.schedules.usual_order import Departure, departures, others_departed
from moediag.evidence.model import Collective, Condition, Evidence
from moediag.records import dataclass

Parameters = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Blame:
    """Which ranks diverged, and the rule that named them."""

    culprits: tuple[int, ...] = ()
    basis: str = "none"
    """gone, left-out, skipped, majority, peers, habit, condition or none."""
    missing: Mapping[int, Parameters] = field(default_factory=dict)
    """Rank -> the parameters that it lacks and others carry."""
    starved: tuple[Starved, ...] = ()
    contradicted: bool = False
    """The culprits are the majority."""
    departures: tuple[Departure, ...] = ()
    """Where ranks first departed from the usual order of this job: culprits, or without a culprit
    those of which it is not known whether they are wrong."""
    condition: Condition | None = None
    """For ``condition``: the one that singles out the culprit."""
    excuse: str = ""
    """Why the ranks that would be named may be innocent: a sentence."""
    elsewhere: str = ""
    """The group on which the absent ranks made the missing call."""


def blame(divergence: Divergence, tokens: Tokens) -> Blame:
    """Returns which ranks diverged."""
    calls = {rank: call for rank, call in divergence.calls.items() if call is not None}
    if divergence.kind == "missing":
        return _missing_call(divergence, calls, tokens)
    if divergence.kind == "order":
        return _order(divergence)
    if divergence.kind == "splits":
        return _pairs(divergence)
    if divergence.odd is not None:
        return Blame((divergence.odd,), "peers")
    if any(call.op in ("send", "recv") for call in calls.values()):
        return Blame()
    found = _left_out(calls, tokens) or _skipped(divergence, calls, tokens)
    if found is None:
        return _by_number(divergence, calls)
    right = _majority(divergence.kind, calls)
    return Blame(
        culprits=found.culprits,
        basis=found.basis,
        missing=found.missing,
        starved=found.starved,
        contradicted=right is not None and bool(set(found.culprits) & right),
    )


def by_usual_order(divergence: Divergence, found: Blame, evidence: Evidence) -> Blame:
    """``found``; where it names nobody, the ranks that departed from the job's usual order. In a
    circle of waits the departure may lie long before the ranks stopped. Nobody, where the majority
    made the call on a group of its own: either group may be the wrong one; or where the majority
    departed from the calls of its own steps before, and the others did not."""
    if found.basis == "majority" and (group := _elsewhere(divergence, evidence)):
        return Blame(elsewhere=group)
    if found.basis == "majority" and others_departed(divergence.calls, found.culprits, evidence):
        return Blame()
    if found.basis == "none":
        odd = departures(divergence.calls, evidence)
        if any(one.early for one in odd):
            return replace(found, departures=odd)
        basis = "peers" if all(one.peers for one in odd) else "habit"
        return Blame(tuple(one.rank for one in odd), basis, departures=odd) if odd else found
    if divergence.kind != "order":
        return found
    calls = {rank: divergence.calls[rank] for rank in found.culprits}
    return replace(found, departures=departures(calls, evidence, alone=True))


def _elsewhere(divergence: Divergence, evidence: Evidence) -> str:
    """The one group, without those that wait, on which each absent rank last made their call."""
    waiting = {rank: call for rank, call in divergence.calls.items() if call is not None}
    call, groups = next(iter(waiting.values()), None), set()
    if divergence.kind != "missing" or call is None or not call.site:
        return ""
    for rank in divergence.absent:
        seen = evidence.ranks[rank]
        same = [one for one in seen.collectives if (one.op, one.site) == (call.op, call.site)]
        group = seen.groups.get(same[-1].group) if same else None
        groups.add("" if group is None or {*group.ranks} & {*waiting} else group.label)
    return groups.pop() if len(groups) == 1 else ""


# ------------------------------------------------------------------------ by what they did


def _left_out(calls: Mapping[int, Collective], tokens: Tokens) -> Blame | None:
    """Ranks whose call carries fewer parameters of the same FSDP group."""
    known = {rank: c for rank, c in calls.items() if c.parameters is not None}
    if len(known) < 2 or len({c.op for c in calls.values()}) > 1:
        return None
    carried = {rank: set(c.parameters or ()) for rank, c in known.items()}
    whole = {rank: carried[rank] | set(c.parameters_missing) for rank, c in known.items()}
    some = next(iter(whole.values()))
    if any(not (some & other) for other in whole.values()):
        return None  # different FSDP groups: a skipped call, not a shorter one
    anywhere = dict.fromkeys(fqn for c in known.values() for fqn in c.parameters or ())
    missing = {
        rank: tuple(fqn for fqn in _in_order(c, anywhere) if fqn not in carried[rank])
        for rank, c in known.items()
    }
    missing = {rank: fqns for rank, fqns in missing.items() if fqns}
    if not missing:
        return None
    starved = tuple(
        s
        for rank, fqns in missing.items()
        for s in tokens.starved(rank, calls[rank].step, fqns, calls)
    )
    return Blame(tuple(sorted(missing)), "left-out", missing, starved)


def _in_order(call: Collective, anywhere: Mapping[str, None]) -> list[str]:
    """``anywhere`` in the order of this rank's FSDP group."""
    own = [fqn for fqn in call.parameters_missing if fqn in anywhere]
    listed = set(own)
    return own + [fqn for fqn in anywhere if fqn not in listed]


def _skipped(
    divergence: Divergence, calls: Mapping[int, Collective], tokens: Tokens
) -> Blame | None:
    """Ranks that routed nothing to the expert whose call the others are in."""
    starved: list[Starved] = []
    missing: dict[int, Parameters] = {}
    for rank, call in calls.items():
        others = [c for r, c in calls.items() if r != rank and c.parameters]
        theirs = tuple(dict.fromkeys(fqn for c in others for fqn in c.parameters or ()))
        lacking = tuple(fqn for fqn in theirs if fqn not in set(call.parameters or ()))
        found = tokens.starved(rank, call.step, lacking, calls)
        if found:
            starved += found
            experts = {(s.layer, s.expert) for s in found}
            missing[rank] = tuple(f for f in lacking if set(experts_of([f])) & experts)
    if not starved:
        return None
    if divergence.silent:
        # The job continued, so every expert starved in this block went wrong in the same way.
        step = min(call.step for call in calls.values())
        for layer in {s.layer for s in starved}:
            starved += [s for s in tokens.all_starved(step, layer, calls) if s not in starved]
    culprits = tuple(sorted({s.rank for s in starved}))
    return Blame(culprits, "skipped", missing, tuple(sorted(starved, key=lambda s: s.rank)))


def _missing_call(divergence: Divergence, calls: Mapping[int, Collective], tokens: Tokens) -> Blame:
    """The absent ranks, or the few that make an extra call where most finished normally. As many
    against as many: either side may be wrong. Ranks of other groups count that wait for the same
    absent ranks: they too made a call that those did not make. Dumps do not show how a rank ended:
    where more ranks are absent than wait, no rank is named."""
    gone = divergence.absent
    if divergence.surplus:
        fewer, more = sorted((tuple(calls), gone), key=len)
        strict = 2 * len(more) > len(divergence.group.ranks)  # ranks that were not seen count
        return Blame(tuple(sorted(fewer)), "majority") if strict else Blame()
    if divergence.inferred and len(gone) > divergence.waiting:
        return Blame()
    peaceful = not divergence.inferred and set(gone) == set(divergence.ended)
    against = len({*calls, *divergence.waiters})
    if peaceful and len(gone) > against:
        return Blame(tuple(sorted(calls)), "majority")
    if peaceful and len(gone) == against:
        return Blame()
    starved = tuple(
        s
        for rank in gone
        for call in calls.values()
        for s in tokens.starved(rank, call.step, call.parameters or (), {*calls, rank})
    )
    missing = {s.rank: next(iter(calls.values())).parameters or () for s in starved}
    return Blame(tuple(sorted(gone)), "gone", missing, tuple(dict.fromkeys(starved)))


# ------------------------------------------------------------------------ by a majority


def _majority(kind: str, calls: Mapping[int, Collective]) -> frozenset[int] | None:
    """The ranks that agree if they are more than half. A rank with an unknown value agrees with
    every group."""
    look = matching.view(kind)
    values: dict[int, Any] = {rank: look(call) for rank, call in calls.items()}
    if len({v for v in values.values() if v is not None}) < 2:
        # The totals agree, the parts do not (an uneven share).
        values = {rank: matching.key(call) for rank, call in calls.items()}
    known = [value for value in values.values() if value is not None]
    best, size = Counter(known).most_common(1)[0]
    if size < 2 or 2 * size <= len(known):
        return None
    return frozenset(rank for rank, value in values.items() if value in (best, None))


def _by_number(divergence: Divergence, calls: Mapping[int, Collective]) -> Blame:
    agreeing = _majority(divergence.kind, calls)
    return Blame(tuple(sorted(set(calls) - agreeing)), "majority") if agreeing else Blame()


def _pairs(divergence: Divergence) -> Blame:
    """The rank that is in every mismatched pair, if exactly one rank is."""
    in_all = [rank for rank in divergence.calls if all(rank in pair for pair in divergence.pairs)]
    return Blame((in_all[0],), "majority") if len(in_all) == 1 else Blame()


def _order(divergence: Divergence) -> Blame:
    """The minority in a circle of waits. Only ranks that take part in every event of the circle
    vote. A send concerns its two ends, not their whole group."""
    voters = set(divergence.events)
    for ((_, ends), _), group in zip(
        sorted(set(divergence.events.values())), divergence.groups, strict=True
    ):
        voters &= set(ends or group.ranks)
    votes = agreement.sides({rank: divergence.events[rank] for rank in voters})
    outside = agreement.minority(votes.values()) if votes else ()
    return Blame(outside, "majority") if outside else Blame()


def independent(
    candidates: Sequence[Divergence], blame_of: Callable[[Divergence], Blame]
) -> tuple[tuple[Divergence, Blame], ...]:
    """The first candidate, and those that the ones before do not explain, with their culprits.

    Where calls do not match, its ranks have no part in those before, or at least the ranks named
    there have none. Where a call is missing, its absent rank is another one, and ranks wait for it
    that made no unmatched call before.
    """
    unmatched = earliest(one for one in candidates if one.kind != "missing")
    found = [(one, blame_of(one)) for one in candidates[:1]]
    for candidate in candidates[1:]:
        gone = {rank for one, _ in found for rank in one.absent}
        made = {rank for one, _ in found if one.kind != "missing" for rank in one.calls}
        calls = {rank: call.index for rank, call in candidate.calls.items() if call is not None}
        if candidate.kind == "missing":
            rightly = any(at < unmatched.get(rank, math.inf) for rank, at in calls.items())
            if rightly and set(candidate.absent) - gone - made:
                found.append((candidate, blame_of(candidate)))
        elif not (gone | made) & calls.keys():
            found.append((candidate, blame_of(candidate)))
        elif candidate.kind in matching.KINDS:
            blamed = blame_of(candidate)
            if blamed.culprits and not (gone | made) & {*blamed.culprits}:
                found.append((candidate, blamed))
    return tuple(found)
