"""Who departed from the usual order of a job: never a rank that did what all were to do."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moediag.diagnosis import diagnose
from moediag.diagnosis.facts import Facts
from moediag.diagnosis.schedules.usual_order import departed
from moediag.evidence.model import Collective, Evidence, RankEvidence
from moediag.result import Confidence
from tests.depth import cases
from tests.unit import periodic_jobs
from tests.unit.evidence_builder import Job, Op

QUICK = settings(
    max_examples=cases(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TRAIN, NORM = Op("0", numel=64), Op("0", numel=1)
EVALUATE, LOG = Op("0", "all_gather", 32), Op("0", "reduce", 2, peer=0)


@pytest.mark.parametrize("kind", periodic_jobs.KINDS)
@QUICK
@given(st.integers(2, 8), st.integers(0, 10**9), st.booleans())
def test_no_innocent_rank_is_ever_named(kind: str, world: int, seed: int, twice: bool) -> None:
    """Jobs with events every N steps, some of them also at the end of each epoch."""
    made = periodic_jobs.plan(random.Random(seed), world, kind, twice)
    found = diagnose(made.evidence())
    assert set(found.culprits) <= {made.rank}, found.cause
    if len(set(found.first_divergence.ranks if found.first_divergence else ())) == 2 == world:
        assert not found.culprits or found.confidence == Confidence.LOW


def job(*programs: list[Op], pairs: bool = False) -> Evidence:
    """A watched job; ``pairs``: ranks 0, 1 and 2, 3 have groups of their own."""
    world = tuple(range(len(programs)))
    groups: dict[str, tuple[tuple[int, ...], str | None]] = {"0": (world, "dp")}
    if pairs:
        groups |= {f"{n}": (world[n : n + 2], "tp") for n in (0, 2)}
    return replace(Job(groups, list(programs)).run(), watched=True)


def trained(*after: Op, steps: int = 10) -> list[Op]:
    """``steps`` steps, then these calls."""
    return [*[TRAIN, NORM] * steps, *after]


def evaluated(every: int, times: int) -> list[Op]:
    return trained(EVALUATE, steps=every) * times


# ------------------------------------------------------------------------ two ranks


def test_the_first_evaluation_names_nobody() -> None:
    """Rank 1 skips it, or rank 0 alone evaluates (``if rank == 0``): the calls are the same."""
    found = diagnose(job(trained(EVALUATE, TRAIN, NORM), trained(TRAIN, NORM)))
    assert (found.verdict, found.culprits) == ("hang", ())
    assert "The evidence does not show which of them is wrong" in found.cause


@pytest.mark.parametrize("every", [3, 40])
def test_a_rank_that_skips_a_regular_evaluation_is_named_with_low_confidence(every: int) -> None:
    before = evaluated(every, 4)
    step = trained(steps=every)
    found = diagnose(job([*before, *step, EVALUATE, TRAIN], [*before, *step, TRAIN, NORM]))
    assert (found.culprits, found.confidence) == ((1,), Confidence.LOW)
    assert f"always came {every} times in a row before all_gather" in found.cause
    assert "rank 1 made it once more" in found.cause


def test_too_few_evaluations_name_nobody() -> None:
    before, step = evaluated(3, 3), trained(steps=3)
    found = diagnose(job([*before, *step, EVALUATE, TRAIN], [*before, *step, TRAIN, NORM]))
    assert found.culprits == ()


def test_an_early_evaluation_is_a_hint() -> None:
    """Its rank skipped a batch, or the other one missed the end of an epoch."""
    before, step = evaluated(4, 5), trained(steps=2)
    found = diagnose(job([*before, *step, EVALUATE, TRAIN], [*before, *step, TRAIN, NORM]))
    assert found.culprits == ()
    assert "The evidence does not show which of them is wrong" in found.cause
    assert "always came after 4 calls of all_reduce" in found.cause
    assert "rank 0 made it after 2" in found.cause


def test_irregular_evaluations_name_nobody() -> None:
    before = [op for every in (3, 5, 3, 4, 3) for op in evaluated(every, 1)]
    step = trained(steps=3)
    found = diagnose(job([*before, *step, EVALUATE, TRAIN], [*before, *step, TRAIN, NORM]))
    assert found.culprits == () and "always came" not in found.cause


def test_a_call_left_out_of_every_step_is_named() -> None:
    found = diagnose(job(trained(TRAIN, NORM, TRAIN), trained(TRAIN, TRAIN, NORM)))
    assert (found.culprits, found.confidence) == ((1,), Confidence.LOW)


def at(evidence: Evidence, *callers: str) -> Evidence:
    """All calls from one line, reached by the program's lines ``callers``."""
    return replace(
        evidence,
        ranks={
            rank: replace(
                seen,
                collectives=tuple(
                    replace(c, site="model.py:7 f", callers=callers) for c in seen.collectives
                ),
            )
            for rank, seen in evidence.ranks.items()
        },
    )


def test_a_size_that_was_always_another_one_names_nobody() -> None:
    """The last batch of one of two ranks may rightly be smaller."""
    one, other = [TRAIN] * 4, [*[TRAIN] * 3, replace(TRAIN, numel=72)]
    found = diagnose(at(job(one, other)))
    assert found.culprits == ()
    assert "The evidence does not show which of them is wrong" in found.cause


def test_lines_that_led_to_a_call_tell_calls_apart() -> None:
    """Training and evaluation share the line of the call, not the lines that led there."""
    before, step = evaluated(3, 4), trained(steps=3)

    def told(evidence: Evidence) -> Evidence:
        def where(call: Collective) -> Collective:
            line = "train.py:90 evaluate" if call.op == "all_gather" else "train.py:40 main"
            size = {"op": "all_reduce", "numel_in": 64, "numel_out": 64}
            call = replace(call, **size) if call.op == "all_gather" else call
            return replace(call, site="model.py:7 f", callers=(line,))

        ranks = {
            rank: replace(seen, collectives=tuple(map(where, seen.collectives)))
            for rank, seen in evidence.ranks.items()
        }
        return replace(evidence, ranks=ranks)

    evidence = told(job([*before, *step, EVALUATE, TRAIN], [*before, *step, TRAIN, NORM]))
    calls = {rank: seen.collectives[-1] for rank, seen in evidence.ranks.items()}
    assert departed(calls, evidence) == (1,)
    blind = replace(
        evidence,
        ranks={
            rank: replace(seen, collectives=tuple(replace(c, callers=()) for c in seen.collectives))
            for rank, seen in evidence.ranks.items()
        },
    )
    calls = {rank: seen.collectives[-1] for rank, seen in blind.ranks.items()}
    assert departed(calls, blind) == ()


# ------------------------------------------------------------------------ ranks with the same role


def paired(rank: int, *after: Op) -> list[Op]:
    name = "0" if rank < 2 else "2"
    return [replace(op, group=name) for op in trained(*after)]


def test_peers_in_other_groups_outvote_a_rank_in_its_first_event() -> None:
    """No rank made that call before; two ranks with the same role make it at the same place."""
    programs = [paired(rank, EVALUATE, TRAIN) for rank in range(4)]
    programs[1] = paired(1, TRAIN, NORM)
    found = diagnose(named(job(*programs, pairs=True)))
    assert (found.culprits, found.confidence) == ((1,), Confidence.MEDIUM)
    assert "After the same calls, ranks 0, 2, 3 called all_gather" in found.cause


def test_one_peer_on_each_side_names_nobody() -> None:
    programs = [paired(rank, EVALUATE, TRAIN) for rank in range(4)]
    programs[1], programs[3] = paired(1, TRAIN, NORM), paired(3, TRAIN, NORM)
    assert diagnose(named(job(*programs, pairs=True))).culprits == ()


def test_ranks_with_another_role_are_no_peers() -> None:
    """Ranks 2 and 3 part from the others in their first step, as another pipeline stage does."""
    programs = [paired(rank, EVALUATE, TRAIN) for rank in range(4)]
    programs[1] = paired(1, TRAIN, NORM)
    for rank in (2, 3):
        programs[rank] = [*[replace(LOG, group="2")] * 2, *programs[rank]]
    assert diagnose(named(job(*programs, pairs=True))).culprits == ()


def named(evidence: Evidence, *without: str) -> Evidence:
    """All groups with a description, except those."""
    return replace(
        evidence,
        ranks={
            rank: replace(
                seen,
                groups={
                    n: replace(
                        g, axis=None, desc="undefined" if n in without else f"of {len(g.ranks)}"
                    )
                    for n, g in seen.groups.items()
                },
            )
            for rank, seen in evidence.ranks.items()
        },
    )


def test_groups_without_a_name_are_distinct() -> None:
    """Two unnamed groups of the same two ranks: calls on them are never taken for each other."""
    groups: dict[str, tuple[tuple[int, ...], str | None]] = {
        "1": ((0, 1), None), "2": ((0, 1), None),
    }  # fmt: skip
    first, second = Op("1", numel=8), Op("2", numel=8)
    steps = [first, second] * 4
    found = Job(groups, [[*steps, first, second], [*steps, second, first]]).run()
    blame = Facts(replace(found, watched=True)).blame
    assert blame.culprits == (1,) and blame.basis == "habit"


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((4, 4, 8), (3,)),  # ranks 1 and 2 only ever sent what rank 0 expects
        ((4, 5, 8), ()),  # each sends as much as it likes
        ((0, 4, 8), ()),  # one other rank is no usage
        ((8, 8, 8), ()),  # only rank 0 makes the call of that line
    ],
)
def test_a_send_that_differs_from_that_line_on_the_other_ranks(
    sizes: tuple[int, ...], named: tuple[int, ...]
) -> None:
    wants = [size if sizes[0] == 8 else 4 for size in sizes[:2]] + [4]
    made = [
        Collective(n, "0", n, "recv", 0, wants[n], "float32", peer=n + 1, site="job.py:2 ask")
        for n in range(3)
        if sizes[n]
    ]
    sent = [
        Collective(0, "0", 0, "send", size, 0, "float32", peer=0, site="job.py:3 answer")
        for size in sizes
    ]
    ranks = {0: RankEvidence(0, collectives=tuple(made))}
    ranks |= {n: RankEvidence(n, collectives=(sent[n - 1],)) for n in (1, 2, 3) if sizes[n - 1]}
    calls = {0: made[-1], 3: sent[2]}
    assert departed(calls, Evidence(4, ranks)) == named


@pytest.mark.parametrize(("leave", "culprits"), [((0,), (0,)), ((1, 2), ()), ((2,), (2,))])
def test_a_majority_that_leaves_out_what_it_always_did_is_not_right(
    leave: tuple[int, ...], culprits: tuple[int, ...]
) -> None:
    """`if usable(batch): backward(); step()` is false on ``leave`` in the sixth step."""
    programs = []
    for rank in range(3):
        steps = [
            [*([] if n == 6 and rank in leave else [Op("a", numel=64, step=n)]),
             Op("a", "all_gather", numel=6, step=n)]
            for n in range(1, 8)
        ]  # fmt: skip
        programs.append([call for step in steps for call in step])
    found = diagnose(replace(Job({"a": ((0, 1, 2), "world")}, programs).run(), watched=True))
    assert (found.verdict, found.culprits) == ("hang", culprits)
