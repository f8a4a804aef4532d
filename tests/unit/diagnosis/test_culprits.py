"""Culprits found from majorities, and cases without one."""

from __future__ import annotations

from typing import Any

import pytest

from moediag.diagnosis import diagnose
from moediag.diagnosis.blame.culprits import Blame, blame, by_usual_order
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.diagnosis.schedules.starvation import Starved, Tokens
from moediag.evidence.model import Collective, Evidence, Group, RankError, RankEvidence
from moediag.result import Confidence, Verdict
from tests.unit.evidence_builder import Job, Op, died, expert


def reductions(*sizes_of_ranks: tuple[int, ...]) -> Job:
    """One group of all ranks; each rank all-reduces its sizes, one a step, without parameters."""
    programs = [
        [Op("0", "all_reduce", numel, step=step) for step, numel in enumerate(sizes, 1)]
        for sizes in sizes_of_ranks
    ]
    return Job({"0": (tuple(range(len(programs))), "dp")}, programs)


# ------------------------------------------------------------------------ majorities


def test_a_two_to_two_split_has_no_culprit() -> None:
    found = diagnose(reductions((16,), (16,), (20,), (20,)).run())
    assert (found.verdict, found.culprits, found.victims) == (Verdict.HANG, (), ())
    assert found.confidence == Confidence.MEDIUM
    assert found.signature.endswith(":no-rank")


def test_two_equally_large_groups_have_no_culprit() -> None:
    """Five ranks, three groups: the two largest have equal size, so there is no majority,
    whichever rank comes first."""
    for sizes in ((16, 16, 20, 20, 24), (24, 20, 20, 16, 16)):
        found = diagnose(reductions(*((numel,) for numel in sizes)).run())
        assert (found.verdict, found.culprits) == (Verdict.HANG, ())


@pytest.mark.parametrize("odd", [0, 3])
def test_one_rank_against_three_is_the_culprit(odd: int) -> None:
    sizes = [(16,)] * 4
    sizes[odd] = (20,)
    found = diagnose(reductions(*sizes).run())
    assert (found.verdict, found.culprits) == (Verdict.HANG, (odd,))
    assert found.confidence == Confidence.HIGH


def test_half_of_the_ranks_are_no_majority() -> None:
    """Where sizes follow the data, two ranks agree by chance."""
    for sizes in ((16, 16, 20, 24), (24, 16, 20, 16), (16, 16, 16, 20, 24, 28)):
        found = diagnose(reductions(*((numel,) for numel in sizes)).run())
        assert (found.verdict, found.culprits, found.victims) == (Verdict.HANG, (), ())


def test_four_different_ranks_have_no_culprit() -> None:
    found = diagnose(reductions((16,), (20,), (24,), (28,)).run())
    assert (found.verdict, found.culprits) == (Verdict.HANG, ())


# ------------------------------------------------------------------------ the steps before


def test_one_earlier_step_names_nobody() -> None:
    for sizes in ([(16, 16), (16, 20)], [(16, 20), (16, 24)], [(16, 16), (16, 20)] * 2):
        found = diagnose(reductions(*sizes).run())
        assert (found.verdict, found.culprits, found.victims) == (Verdict.HANG, (), ())
        assert found.signature.endswith(":no-rank")


# ------------------------------------------------------------------------ exception or divergence


def raised(time: float) -> Evidence:
    """Rank 0 raises in its second step; at 4.0 and 5.0 ranks 1 and 2 bring different sizes to a
    reduction that rank 0 never comes to."""
    evidence = reductions((16,), (16, 16), (16, 20)).run()
    first = min(c.time for rank in (1, 2) for c in evidence.ranks[rank].collectives[1:])
    assert first == 4.0
    return died(evidence, 0, RankError("IndexError", "index 9", "model.py:40 load", time=time))


def test_an_exception_before_the_divergence_is_the_cause() -> None:
    """What other ranks did after one was gone does not show which failed first."""
    found = diagnose(raised(3.5))
    assert (found.verdict, found.culprits, found.victims) == (Verdict.CRASH, (0,), (1, 2))
    assert found.signature == "crash:IndexError:model.py load:one-rank"


@pytest.mark.parametrize("time", [4.5, 0.0])
def test_an_exception_after_the_divergence_or_at_an_unknown_time_is_a_consequence(
    time: float,
) -> None:
    found = diagnose(raised(time))
    assert found.verdict == Verdict.COLLECTIVE_MISMATCH
    assert found.first_divergence is not None
    assert {rank for rank, side in found.first_divergence.ranks.items() if side.op != "none"} == {
        "1",
        "2",
    }


# ------------------------------------------------------------------------ the basis


def blamed(*sides: Collective, kind: str = "size", **more: Any) -> Blame:
    calls = dict(enumerate(sides))
    group = Group("0", tuple(calls))
    return blame(Divergence(kind, group, 0, calls, **more), Tokens())


def call(numel: int = 8, op: str = "all_reduce", **more: Any) -> Collective:
    return Collective(0, "0", 0, op, numel, numel, "float32", **more)


def test_blame_states_its_basis() -> None:
    assert blamed(call(8), call(8), call(9)) == Blame((2,), "majority")
    assert blamed(call(8), call(8), call(9), call(10)) == Blame()
    assert blamed(call(8), call(8), call(9), call(9)) == Blame()
    assert blamed(call(8), call(9)) == Blame()
    assert Blame().basis == "none"


def test_a_point_to_point_call_has_no_culprit() -> None:
    for op in ("send", "recv"):
        assert blamed(call(8, op, peer=1), call(9, op, peer=0), call(9, op, peer=0)) == Blame()


def test_an_unknown_value_agrees_with_every_rank() -> None:
    plain, other = call(reduce="sum"), call(reduce="avg")
    assert blamed(plain, plain, other, call(), kind="reduce") == Blame((2,), "majority")
    # The known values are split evenly.
    assert blamed(plain, other, call(), call(), kind="reduce") == Blame()


def test_parts_are_compared_when_totals_are_equal() -> None:
    def part(numel: int) -> Collective:
        return Collective(0, "0", 0, "all_gather", numel, 12, "float32")

    assert blamed(part(4), part(4), part(5)) == Blame((2,), "majority")


@pytest.mark.parametrize(
    ("pairs", "culprits"),
    [
        (((0, 1), (0, 2)), (0,)),
        (((0, 2), (1, 2)), (2,)),
        (((0, 1),), ()),  # either of the two
        (((0, 1), (2, 3)), ()),  # no rank is in both
    ],
)
def test_the_rank_in_every_mismatched_pair_is_the_culprit(
    pairs: tuple[tuple[int, int], ...], culprits: tuple[int, ...]
) -> None:
    found = blamed(*[call(op="all_to_all")] * 4, kind="splits", pairs=pairs)
    assert found == (Blame(culprits, "majority") if culprits else Blame())


def test_omitted_parameters_are_listed_in_group_order() -> None:
    whole = call(30, parameters=("a", "b", "c"))
    short = call(10, parameters=("b",), parameters_missing=("c", "a"))
    found = blamed(whole, short, whole)
    assert found == Blame((1,), "left-out", {1: ("c", "a")})
    # A majority that leaves them out is still the culprit, and the contradiction is noted.
    assert blamed(whole, short, short) == Blame(
        (1, 2), "left-out", {1: ("c", "a"), 2: ("c", "a")}, contradicted=True
    )
    # Another FSDP group is a skipped call, not a shorter one; nor is another operation.
    assert blamed(whole, call(10, parameters=("x",)), whole).basis == "majority"
    other = call(10, "all_gather", parameters=("b",), parameters_missing=("a", "c"))
    assert blamed(whole, other, whole, kind="op").basis == "majority"
    # If only one side is known, nothing is missing.
    assert blamed(short, call(30), call(30)).basis == "majority"


def test_token_counts_identify_the_rank_that_skipped_an_expert() -> None:
    one = call(8, parameters=expert(0, 3), step=2)
    other = call(8, "reduce_scatter", parameters=expert(0, 2), step=2)
    counts = {0: [5, 5, 5, 5], 1: [5, 5, 5, 0]}
    tokens = Tokens({(2, "model.layers.0.mlp"): counts}, {"model.layers.0.mlp"})
    group = Group("0", (0, 1))
    found = blame(Divergence("op", group, 0, {0: one, 1: other}), tokens)
    starved = Starved(1, "model.layers.0.mlp", 3, ((0, 5),))
    assert found == Blame((1,), "skipped", {1: expert(0, 3)}, (starved,))
    # Counts of another step, or tokens on both ranks, decide nothing.
    late = Tokens({(3, "model.layers.0.mlp"): counts}, {"model.layers.0.mlp"})
    assert blame(Divergence("op", group, 0, {0: one, 1: other}), late) == Blame()


@pytest.mark.parametrize(
    ("gone", "callers", "options", "culprits", "basis"),
    [
        ((1,), (0,), {}, (1,), "gone"),
        ((1, 2), (0,), {"ended": (1, 2)}, (0,), "majority"),
        ((1, 2), (0,), {"ended": (1,)}, (1, 2), "gone"),
        ((1, 2), (0,), {"inferred": True, "waiting": 1}, (), "none"),
        ((1, 2), (0,), {"inferred": True, "waiting": 5}, (1, 2), "gone"),
        ((2, 3), (0, 1), {}, (2, 3), "gone"),
        # Two left out a call, or the two others make one too many.
        ((2, 3), (0, 1), {"ended": (2, 3)}, (), "none"),
        ((2, 3), (0, 1), {"ended": (2, 3), "waiters": (0, 1)}, (), "none"),
        # In another group another rank waits for the one that ended.
        ((3,), (1,), {"ended": (3,), "waiters": (1,)}, (), "none"),
        ((3,), (1,), {"ended": (3,), "waiters": (1, 2)}, (3,), "gone"),
        ((2, 3), (1,), {"ended": (2, 3), "waiters": (1, 0)}, (), "none"),
    ],
)
def test_absent_ranks_are_blamed_for_a_missing_call(
    gone: tuple[int, ...], callers: tuple[int, ...], options: dict[str, Any],
    culprits: tuple[int, ...], basis: str,
) -> None:  # fmt: skip
    calls = {**dict.fromkeys(gone), **dict.fromkeys(callers, call())}
    divergence = Divergence("missing", Group("0", (0, 1)), 0, calls, absent=gone, **options)
    assert blame(divergence, Tokens()) == Blame(culprits, basis)


@pytest.mark.parametrize(
    ("members", "site", "found"),
    [
        ((0, 1), "a.py:1 f", Blame(elsewhere="ranks 0, 1")),
        ((0, 1, 2), "a.py:1 f", Blame((2,), "majority")),
        ((0, 1), "a.py:2 f", Blame((2,), "majority")),
        ((0, 1), "", Blame((2,), "majority")),
    ],
)
def test_nobody_is_blamed_for_a_call_that_the_others_made_on_a_group_of_their_own(
    members: tuple[int, ...], site: str, found: Blame
) -> None:
    made = Collective(0, "1", 0, "barrier", 1, 1, "float32", site=site)
    seen = {r: RankEvidence(r, (made,), {"1": Group("1", members)}) for r in (0, 1)}
    calls = {0: None, 1: None, 2: call(1, "barrier", site="a.py:1 f")}
    divergence = Divergence("missing", Group("0", (0, 1, 2)), 0, calls, absent=(0, 1), ended=(0, 1))
    evidence = Evidence(3, {**seen, 2: RankEvidence(2)})
    assert by_usual_order(divergence, blame(divergence, Tokens()), evidence) == found
