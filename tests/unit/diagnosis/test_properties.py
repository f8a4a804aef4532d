"""Random schedules: healthy ones have no divergence; an injected one is found at its position.

The place is where the ranks first disagree; the culprit is the rank that was changed, where
anything can tell (its parameters, or a majority), and never another one.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moediag.diagnosis.blame.culprits import blame, by_usual_order
from moediag.diagnosis.end_states.failures import failures
from moediag.diagnosis.schedules.align import align
from moediag.diagnosis.schedules.diverge import Divergence, divergences
from moediag.diagnosis.schedules.replay import replay
from moediag.diagnosis.schedules.starvation import tokens_of
from moediag.evidence.model import Evidence
from tests.depth import cases
from tests.unit.evidence_builder import Job, Op

QUICK = settings(
    max_examples=cases(240), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
LAYOUTS = [(2, 1), (3, 1), (2, 2), (4, 1), (2, 3), (2, 4)]


def found(evidence: Evidence) -> tuple[Divergence | None, tuple[int, ...]]:
    """(first divergence, culprits)."""
    aligned = align(evidence)
    run = replay(aligned, evidence)
    divergence = next(iter(divergences(aligned, run, evidence, failures(evidence))), None)
    if divergence is None:
        return None, ()
    found = by_usual_order(divergence, blame(divergence, tokens_of(evidence)), evidence)
    return divergence, found.culprits


def groups_of(outer: int, inner: int) -> dict[str, tuple[tuple[int, ...], str | None]]:
    """All ranks, the rows and the columns of a grid. All rows share one name, as the groups of
    a split communicator do: a group is its name and its ranks."""
    world = tuple(range(outer * inner))
    groups: dict[str, tuple[tuple[int, ...], str | None]] = {"world": (world, None)}
    for i in range(outer):
        row = world[i * inner : (i + 1) * inner]
        if inner > 1:
            groups[f"row{i}"] = (row, "tp")
    for j in range(inner):
        column = world[j::inner]
        if 1 < len(column) < len(world):
            groups[f"column{j}"] = (column, "dp_shard")
    return groups


@st.composite
def healthy(draw: st.DrawFn, unique: bool = False) -> tuple[Job, list[tuple[str, dict[int, Op]]]]:
    """A job and its collectives in one global order, which is what makes it healthy."""
    outer, inner = draw(st.sampled_from(LAYOUTS))
    groups = groups_of(outer, inner)
    programs: list[list[Op]] = [[] for _ in range(outer * inner)]
    events = []
    for number in range(draw(st.integers(3, 24))):
        name = draw(st.sampled_from(sorted(groups)))
        op = draw(collective(name, number, unique))
        ranks = groups[name][0]
        sides = dict.fromkeys(ranks, op)
        if op.op == "all_to_all":
            sides = draw(all_to_all(op, ranks))
        for rank in ranks:
            programs[rank].append(sides[rank])
        events.append((name, sides))
    return Job(groups, programs), events


@st.composite
def collective(draw: st.DrawFn, group: str, number: int, unique: bool) -> Op:
    kind = draw(
        st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"])
    )
    unit = number if unique else draw(st.integers(0, 3))
    parameters = tuple(f"layers.{unit}.{p}" for p in "qkv")
    carries = kind in ("all_gather", "reduce_scatter") and draw(st.booleans())
    return Op(
        group,
        kind,
        numel=24 * draw(st.integers(1, 3)) if kind != "barrier" else 0,
        dtype=draw(st.sampled_from(["float32", "bfloat16"])) if kind != "barrier" else "",
        parameters=parameters if carries else None,
        asynchronous=draw(st.booleans()) and kind == "all_gather",
    )


@st.composite
def all_to_all(draw: st.DrawFn, op: Op, ranks: tuple[int, ...]) -> dict[int, Op]:
    sent = {i: {j: draw(st.integers(0, 3)) for j in ranks} for i in ranks}
    return {
        i: replace(
            op,
            numel=sum(sent[i].values()),
            splits_in=tuple(sent[i][j] for j in ranks),
            splits_out=tuple(sent[j][i] for j in ranks),
        )
        for i in ranks
    }


@QUICK
@given(healthy())
def test_healthy_schedules_have_no_divergence(
    case: tuple[Job, list[tuple[str, dict[int, Op]]]],
) -> None:
    job, _ = case
    for evidence in (job.run(), job.whole()):
        assert found(evidence) == (None, ())


@QUICK
@given(healthy(), st.data())
def test_lost_earlier_calls_are_not_a_divergence(
    case: tuple[Job, list[tuple[str, dict[int, Op]]]], data: st.DataObject
) -> None:
    """A ring buffer drops a different number of the oldest calls on each rank."""
    evidence = case[0].whole()
    ranks = {}
    for rank, seen in evidence.ranks.items():
        drop = data.draw(st.integers(0, max(0, len(seen.collectives) - 1)))
        ranks[rank] = replace(seen, collectives=seen.collectives[drop:])
    assert found(replace(evidence, ranks=ranks)) == (None, ())


@QUICK
@given(healthy(), st.data())
def test_unknown_parameters_are_not_a_divergence(
    case: tuple[Job, list[tuple[str, dict[int, Op]]]], data: st.DataObject
) -> None:
    evidence = case[0].run()
    rank = data.draw(st.sampled_from(sorted(evidence.ranks)))
    seen = evidence.ranks[rank]
    blind = tuple(replace(c, parameters=None) for c in seen.collectives)
    assert found(
        replace(evidence, ranks={**evidence.ranks, rank: replace(seen, collectives=blind)})
    ) == (
        None,
        (),
    )


def change(kind: str, op: Op) -> Op | None:
    """Returns ``op`` with a difference of ``kind``; None if that is impossible."""
    plain = op.op not in ("barrier", "all_to_all")
    if kind == "size" and plain:
        return replace(op, numel=op.numel * 2)
    if kind == "dtype" and op.op != "barrier":
        return replace(op, dtype="float16")
    if kind == "op":
        new = "broadcast" if plain else "all_reduce"
        return replace(op, op=new, numel=op.numel or 8, splits_in=None, splits_out=None)
    if kind in ("left out", "left out silently") and op.parameters:
        shorter = op.numel if kind == "left out silently" else op.numel - 24
        short = replace(
            op, parameters=op.parameters[:-1], missing=op.parameters[-1:], numel=shorter
        )
        return short if shorter else None
    return None


@pytest.mark.parametrize("kind", ["size", "dtype", "op", "left out", "left out silently"])
@QUICK
@given(healthy(), st.data())
def test_one_changed_call_is_found(
    kind: str, case: tuple[Job, list[tuple[str, dict[int, Op]]]], data: st.DataObject
) -> None:
    job, events = case
    possible = [
        (n, name, rank, new)
        for n, (name, sides) in enumerate(events)
        for rank, op in sides.items()
        if (new := change(kind, op)) is not None
    ]
    if not possible:
        return
    number, name, rank, new = data.draw(st.sampled_from(possible))
    position = sum(other == name for other, _ in events[:number])
    at = sum(rank in sides for _, sides in events[:number])
    job.programs[rank][at] = new
    for evidence in (job.run(), job.whole()):
        divergence, culprits = found(evidence)
        assert divergence is not None
        expected = {"left out": "size", "left out silently": "parameters"}.get(kind, kind)
        assert (divergence.kind, divergence.group.name, divergence.position) == (
            expected,
            name,
            position,
        )
        decidable = kind.startswith("left out") or len(job.groups[name][0]) > 2
        assert culprits == ((rank,) if decidable else ())


@QUICK
@given(healthy(), st.data())
def test_a_mismatched_split_is_found(
    case: tuple[Job, list[tuple[str, dict[int, Op]]]], data: st.DataObject
) -> None:
    """One rank sends a row to the wrong rank."""
    job, events = case
    possible = [
        (n, name, rank, giver)
        for n, (name, sides) in enumerate(events)
        for rank, op in sides.items()
        for giver, rows in enumerate(op.splits_in or ())
        if rows
    ]
    if not possible:
        return
    number, name, rank, giver = data.draw(st.sampled_from(possible))
    op = events[number][1][rank]
    rows = list(op.splits_in or ())
    taker = (giver + 1) % len(rows)
    rows[giver] -= 1
    rows[taker] += 1
    at = sum(rank in sides for _, sides in events[:number])
    job.programs[rank][at] = replace(op, splits_in=tuple(rows))
    divergence, culprits = found(job.run())
    assert divergence is not None
    position = sum(other == name for other, _ in events[:number])
    assert (divergence.kind, divergence.group.name, divergence.position) == (
        "splits",
        name,
        position,
    )
    ranks = job.groups[name][0]
    assert set(divergence.pairs) == {(rank, ranks[giver]), (rank, ranks[taker])}
    assert culprits == (rank,)


@QUICK
@given(healthy(unique=True), st.data())
def test_a_skipped_call_is_found(
    case: tuple[Job, list[tuple[str, dict[int, Op]]]], data: st.DataObject
) -> None:
    job, events = case
    number = data.draw(st.integers(0, len(events) - 1))
    name, sides = events[number]
    rank = data.draw(st.sampled_from(sorted(sides)))
    at = sum(rank in s for _, s in events[:number])
    del job.programs[rank][at]
    evidence = job.run()
    divergence, culprits = found(evidence)
    same = [s for other, s in events if other == name]
    position = sum(other == name for other, _ in events[:number])
    if divergence is None:
        # Only asynchronous or equal calls may hide it, and then no rank waits.
        assert evidence.stall is None
        assert all(s[rank].asynchronous for s in same[position:])
        return
    assert set(culprits) <= {rank}
    assert divergence.group.name == name or any(g.name == name for g in divergence.groups)
    if divergence.kind not in ("order", "missing"):
        # Equal calls replace each other; the first different one shows the divergence.
        assert divergence.position >= position
        if divergence.kind == "splits":
            # One pair alone does not show which rank is wrong.
            assert all(rank in pair for pair in divergence.pairs)
        elif len(divergence.calls) > 2:
            assert culprits == (rank,)
    if divergence.kind == "missing":
        assert divergence.position == len(same) - 1
        assert culprits == (rank,) or len(divergence.calls) == 2


@QUICK
@given(healthy(), st.data())
def test_an_inverted_order_is_found(
    case: tuple[Job, list[tuple[str, dict[int, Op]]]], data: st.DataObject
) -> None:
    """One rank swaps two neighbouring calls of different groups."""
    job, _ = case
    possible = [
        (rank, at)
        for rank, program in enumerate(job.programs)
        for at, (a, b) in enumerate(pairwise(program))
        if a.group != b.group and not a.asynchronous and not b.asynchronous
    ]
    if not possible:
        return
    rank, at = data.draw(st.sampled_from(possible))
    program = job.programs[rank]
    first, second = program[at], program[at + 1]
    program[at], program[at + 1] = second, first
    evidence = job.run()
    voters = set(job.groups[first.group][0]) & set(job.groups[second.group][0])
    for seen in (evidence, job.whole()):
        divergence, culprits = found(seen)
        if evidence.stall is None:
            assert divergence is None
            continue
        assert divergence is not None and divergence.kind == "order"
        assert {g.name for g in divergence.groups} >= {first.group, second.group}
        assert set(culprits) <= {rank}
        if len(voters) > 2 and len(divergence.groups) == 2:
            assert culprits == (rank,)


@QUICK
@given(healthy(), st.data())
def test_a_rank_that_ends_early_is_found(
    case: tuple[Job, list[tuple[str, dict[int, Op]]]], data: st.DataObject
) -> None:
    job, _ = case
    rank = data.draw(st.integers(0, job.world - 1))
    job.programs[rank] = job.programs[rank][: data.draw(st.integers(0, len(job.programs[rank])))]
    evidence = job.run()
    divergence, culprits = found(evidence)
    if evidence.stall is None:
        return
    assert divergence is not None
    assert (divergence.kind, divergence.absent) == ("missing", (rank,))
    # Of two ranks, the other one may have made a call too many, unless it is a repeated one.
    assert culprits == (rank,) or (culprits == () and len(divergence.calls) == 2)
