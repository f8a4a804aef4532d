"""Where the ranks of a user's own job are in the user's code, and the conditions that part them.

Two calls that meet and differ do not show which of them is wrong, but a condition may: where one
side's call is in a branch for one rank (``if rank == 0``) and the other side's is not, the program
singles that rank out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from moediag.diagnosis.blame.culprits import Blame
from moediag.diagnosis.blame.forks import Fork
from moediag.diagnosis.blame.nodes import open_call
from moediag.diagnosis.end_states.failures import Failure, is_communication
from moediag.diagnosis.end_states.whereabouts import IS, activity, program_lines
from moediag.diagnosis.schedules.align import POINT_TO_POINT
from moediag.diagnosis.schedules.device_frontier import stuck_in
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.evidence.model import UNTOLD, Collective, Condition, Evidence, RankEvidence
from moediag.evidence.rank_stacks import in_collective, stand, that_counts
from moediag.records import dataclass

# What may name a rank less surely than the program's own condition.
_WEAKER = ("none", "habit")


@dataclass(frozen=True, slots=True)
class Standing:
    """Ranks that stand at the same place."""

    ranks: tuple[int, ...]
    #: The innermost line of the user's code, "" if unknown.
    line: str
    what: str
    #: The call that they wait in or made there, if they do.
    call: Collective | None
    callers: tuple[str, ...]
    #: Outermost first; None if the source is unknown.
    conditions: tuple[Condition, ...] | None
    #: The line is the one that made the call, or that ended the rank, as far as was recorded.
    exact: bool = False
    #: Conditions that part them from the other ranks, the most telling first.
    apart: tuple[Condition, ...] = ()

    @property
    def at(self) -> str:
        """``train.py:96``."""
        return self.line.partition(" ")[0]

    @property
    def function(self) -> str:
        """The name of the line's function, "" if unknown."""
        return self.line.partition(" ")[2]


def standings(
    evidence: Evidence,
    found: Divergence | None,
    failed: Iterable[Failure] = (),
) -> tuple[Standing, ...]:
    """Where the ranks are, most ranks first; those in ``failed`` where they failed."""
    if not evidence.watched and evidence.looks is None:
        return ()
    own = {failure.rank: failure for failure in failed}
    together: dict[tuple[object, ...], list[int]] = {}
    example: dict[tuple[object, ...], Standing] = {}
    for rank, seen in sorted(evidence.ranks.items()):
        one = _failed(seen, own[rank]) if rank in own else _standing(evidence, seen, found)
        if one is not None:
            key = (one.line, one.what, one.callers)
            together.setdefault(key, []).append(rank)
            example.setdefault(key, one)
    every = [replace(example[key], ranks=tuple(who)) for key, who in together.items()]
    members = _members(found, evidence)
    made = [replace(one, apart=tuple(_apart(one, every, members))) for one in every]
    return tuple(sorted(made, key=lambda s: (-len(s.ranks), s.ranks)))


def _failed(seen: RankEvidence, failure: Failure) -> Standing:
    what = "ended without a trace" if failure.name == UNTOLD else failure.name
    what = f"raised {failure.name}" if failure.where or failure.message else what
    left = seen.left.lines if seen.left is not None else ()
    raised = tuple(filter(None, (failure.where, failure.called)))
    lines = raised or left or program_lines(seen) or ("",)
    return Standing((seen.rank,), lines[0], what, None, lines[1:], _conditions(seen, lines[:1]))


def _standing(evidence: Evidence, seen: RankEvidence, found: Divergence | None) -> Standing | None:
    lines, call, what = program_lines(seen), None, ""
    diverging = found.calls.get(seen.rank) if found is not None else None
    stall, stuck = evidence.stall, stuck_in(seen)
    if found is not None and found.surplus and diverging is not None:
        call, what, lines = diverging, f"called {diverging.op}", _made_at(diverging, seen)
    elif diverging is not None and stuck is not None and stuck.index >= diverging.index:
        # Python ran on from there: its stack shows only where it first needed a result.
        call, lines = diverging, _made_at(diverging, seen)
        here = stuck.index == diverging.index
        what = f"waits in {call.op} on the device" if here else f"called {call.op}"
    elif stall is not None and seen.rank in stall.waiting:
        call = open_call(evidence, seen.rank)
        if diverging is not None and _made_at(diverging, seen)[:1] == lines[:1]:
            call = diverging
        operation = call.op if call is not None else _operation(seen)
        what = f"waits in {operation}" if operation else "waits"
        lines = lines or _made_at(call, seen)
    elif stall is not None and seen.rank in stall.elsewhere and lines:
        what = activity(evidence, seen)
        what = "" if what == IS else what
    elif diverging is not None:
        call, what = diverging, f"called {diverging.op}"
        made = _made_at(call, seen)
        lines = lines if made[:1] == lines[:1] else made
    if not lines:
        return _ended(seen, found)
    exact = call is not None and (not seen.user_files or _made_at(call, seen)[:1] == lines[:1])
    known = _conditions(seen, lines)
    return Standing((seen.rank,), lines[0], what, call, lines[1:], known, exact)


def _operation(seen: RankEvidence) -> str:
    """The call of communication on the rank's stack, or ""."""
    stack = that_counts(seen.stacks)
    if stack is None or not in_collective(stack):
        return ""
    return stand(stack, seen.libraries).partition(", called by ")[0]


def _conditions(seen: RankEvidence, lines: Sequence[str]) -> tuple[Condition, ...] | None:
    """Those of ``lines``, which are innermost first; None if the source of none is known."""
    known = [seen.conditions[line] for line in reversed(lines) if line in seen.conditions]
    return tuple(c for of_line in known for c in of_line) if known else None


def _made_at(call: Collective | None, seen: RankEvidence) -> tuple[str, ...]:
    """The user's lines that made the call, as recorded with it; without any the library's."""
    if call is None:
        return ()
    users = not seen.user_files or call.site.partition(":")[0] in seen.user_files
    lines = (call.site, *call.callers) if users else call.callers
    return tuple(filter(None, lines or (call.site,)))


def _ended(seen: RankEvidence, found: Divergence | None) -> Standing | None:
    if found is None or seen.rank not in found.ended:
        return None
    left = found.left.get(seen.rank)
    if left is None:
        return Standing((seen.rank,), "", "finished", None, (), None)
    known = _conditions(seen, left.lines)
    what = f"ended by {left.how}"
    return Standing((seen.rank,), left.lines[0], what, None, left.lines[1:], known, exact=True)


def _members(found: Divergence | None, evidence: Evidence) -> frozenset[int]:
    """The ranks that must make the call: conditions that keep out others do not matter."""
    groups = (found.group, *found.groups) if found is not None else ()
    return frozenset(r for group in groups for r in group.ranks) or frozenset(evidence.ranks)


def _apart(
    one: Standing, every: Sequence[Standing], members: frozenset[int]
) -> Iterator[Condition]:
    others = [other for other in every if other is not one]
    elsewhere = {rank for other in others for rank in other.ranks} & members
    known = [o.conditions for o in others if o.conditions is not None and members & {*o.ranks}]
    keeping, naming, rest = [], [], []
    for condition in reversed(one.conditions or ()):
        keeps_out = frozenset() if _misread(condition, every) else condition.keeps_out
        shared = all(any(_same(condition, c) for c in of_other) for of_other in known)
        if keeps_out & elsewhere:
            keeping.append(condition)
        elif condition.names_rank and not keeps_out and (not shared or not known):
            naming.append(condition)
        elif condition.side != "loop" and not condition.names_rank and known and not shared:
            rest.append(condition)
    yield from dict.fromkeys((*keeping, *naming, *rest))


def _misread(condition: Condition, every: Sequence[Standing]) -> bool:
    """Whether a rank is where the condition should keep it out: its names mean something else,
    such as the rank in a group."""
    return any(
        _same(condition, other) and other.keeps_out & {*one.ranks}
        for one in every
        for other in one.conditions or ()
    )


def _same(one: Condition, other: Condition) -> bool:
    return (one.file, one.line, one.side) == (other.file, other.line, other.side)


def dividing(found: Sequence[Standing]) -> tuple[Condition, Standing, Standing] | None:
    """An ``if`` that names a rank and has some ranks in its body and others in its else branch."""
    for one in found:
        for condition in one.apart:
            if condition.side != "under" or not condition.names_rank:
                continue
            for other in found:
                if any(_same(replace(condition, side="else"), c) for c in other.apart):
                    return condition, one, other
    return None


def by_condition(
    found: Blame,
    divergence: Divergence,
    standing: Sequence[Standing],
    evidence: Evidence,
    forked: Fork | None = None,
) -> Blame:
    """``found``, or the rank for which the program has a branch of its own there, or that caught an
    exception there. That decides where at most the job's past does; where both name different
    ranks, neither does."""
    if found.basis == "majority" and forked is not None and forked.left:
        # Ranks that leave something out are no more usual for being more.
        return found if {*forked.left} & {*found.culprits} else Blame()
    if found.basis == "majority" and _in_a_branch_of_their_own(found, standing):
        return Blame()
    even = divergence.kind == "missing" and set(divergence.absent) == set(divergence.ended)
    if found.basis not in _WEAKER and not (found.basis == "gone" and even):
        return found
    if even and _left_a_loop(divergence, standing):
        found = replace(found, culprits=tuple(sorted(divergence.absent)), basis="gone")
    if {call.op for call in divergence.calls.values() if call is not None} <= POINT_TO_POINT:
        return found  # a send and its receive are rightly under different conditions
    told = dict(_singled_out(divergence, standing, evidence, forked))
    who = next(iter(told)) if len(told) == 1 else ()
    if not who or not {*who} <= {*divergence.calls}:
        return found
    if found.culprits and found.basis != "gone" and found.culprits != who:
        return Blame()
    return Blame(who, "condition", departures=found.departures, condition=told[who])


def _in_a_branch_of_their_own(found: Blame, standing: Sequence[Standing]) -> bool:
    """Whether the program keeps the culprits from where the majority is by a test that singles out
    no rank, as where both branches communicate (``if rank == 0: send() else: receive()``): they
    are no minority of ranks that should be there."""
    return any(
        condition.names_rank
        and condition.singles is None
        and condition.keeps_out >= {*found.culprits}
        for one in standing
        if not {*one.ranks} & {*found.culprits}
        for condition in one.apart
    )


def _left_a_loop(divergence: Divergence, standing: Sequence[Standing]) -> bool:
    """Whether the absent ranks ended at once inside a loop in which all others still are: those
    were not done. ``sys.exit`` does not count: programs end by it when they have trained enough."""
    if not all(rank in divergence.left for rank in divergence.absent):
        return False
    if not all(left.at_once for left in divergence.left.values()):
        return False
    inside = [
        {(c.file, c.line) for c in one.conditions or () if c.side == "loop"}
        for one in standing
        if {*one.ranks} & {*divergence.calls}
    ]
    return bool(inside) and bool(set.intersection(*inside))


def _singled_out(
    divergence: Divergence,
    standing: Sequence[Standing],
    evidence: Evidence,
    forked: Fork | None,
) -> Iterator[tuple[tuple[int, ...], Condition]]:
    """Ranks, and the condition around a diverging call that singles them out. A call that was
    completed before at the same place is not apart: the other ranks have one that meets it."""
    for one in standing:
        call = one.call
        if not one.exact or call != divergence.calls.get(one.ranks[0]):
            continue
        for condition in one.apart:
            if condition.unless and (
                (forked is not None and forked.decided(condition))
                or _told_apart(condition, one.ranks, divergence, evidence)
            ):
                yield _single(condition, one, divergence), condition
            elif condition.leaves and forked is not None and forked.decided(condition):
                left = {*divergence.calls} - {*one.ranks}
                if left == {condition.singles}:  # `rank == 1 and …: break`
                    yield tuple(left), condition
        own = evidence.ranks[one.ranks[0]].collectives
        if call is not None and _met_before(call, own, evidence):
            continue
        for condition in one.apart:
            if condition.side == "handler":
                if not handles_a_call(one, evidence):
                    yield one.ranks, condition
            elif condition.keeps_out:
                yield _single(condition, one, divergence), condition


def handles_a_call(one: Standing, evidence: Evidence) -> bool:
    """Whether ranks are in the handler of an error of communication, which other ranks caused."""
    errors = [evidence.ranks[rank].handling for rank in one.ranks]
    return any(error is not None and is_communication(error) for error in errors)


def _told_apart(
    condition: Condition, inside: Sequence[int], divergence: Divergence, evidence: Evidence
) -> bool:
    """Whether the condition was true on the ranks ``inside`` alone when all were examined, and
    ranks differed in one name only: then the clause that names the rank decided."""
    place = f"{condition.file}:{condition.line}"
    known = {rank: evidence.ranks[rank].tested.get(place) for rank in divergence.calls}
    tested = [test for test in known.values() if test is not None]
    if len(tested) < len(known) or not tested:
        return False
    names = {name for test in tested for name in test.values}
    differ = [name for name in names if len({test.values.get(name) for test in tested}) > 1]
    holds = {rank for rank, test in known.items() if test is not None and test.holds}
    return condition.side == "under" and holds == {*inside} and len(differ) == 1


def _single(condition: Condition, one: Standing, divergence: Divergence) -> tuple[int, ...]:
    """The rank that the condition compares with. Of two ranks, ``rank != 0`` and ``rank == 1`` let
    the same one pass and compare with different ones: then only the one that passes is named."""
    single = condition.singles
    passes = single in one.ranks or 2 * len(one.ranks) > len(divergence.calls)
    return () if single is None or not passes else (single,)


def _met_before(call: Collective, own: Sequence[Collective], evidence: Evidence) -> bool:
    """Whether the call was completed before at the same place, with a counterpart: another rank's
    call from a line from which this rank calls as well met it by chance, as both have one size."""
    earlier = {
        one.position: one
        for one in own
        if one.completed and one.index < call.index and one.statement == call.statement
    }
    if not earlier:
        return False
    places, here = {one.place for one in own}, call.place
    met: dict[int, list[object]] = {position: [] for position in earlier}
    for seen in evidence.ranks.values():
        for one in seen.collectives:
            if one.group == call.group and one.position in met and one is not earlier[one.position]:
                met[one.position].append(one.place)
    return any(
        not others or any(other == here or other not in places for other in others)
        for others in met.values()
    )


def caught(standing: Sequence[Standing]) -> tuple[Standing, Condition] | None:
    """Ranks whose call is in the handler of an exception that the others did not catch."""
    for one in standing:
        for condition in one.apart:
            if condition.side == "handler" and one.call is not None:
                return one, condition
    return None
