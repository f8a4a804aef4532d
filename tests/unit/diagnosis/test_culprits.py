"""Who is named where nothing but numbers or the step before can tell, and who is not."""

from __future__ import annotations

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.model import Evidence, RankError
from moediag.result import Confidence, Verdict
from tests.unit.evidence_builder import Job, Op, died


def reductions(*sizes_of_ranks: tuple[int, ...]) -> Job:
    """One group of all ranks; each rank all-reduces its sizes, one a step, without parameters."""
    programs = [
        [Op("0", "all_reduce", numel, step=step) for step, numel in enumerate(sizes, 1)]
        for sizes in sizes_of_ranks
    ]
    return Job({"0": (tuple(range(len(programs))), "dp")}, programs)


# ------------------------------------------------------------------------ by their number


def test_two_ranks_against_two_name_nobody() -> None:
    found = diagnose(reductions((16,), (16,), (20,), (20,)).run())
    assert (found.verdict, found.culprits, found.victims) == (Verdict.HANG, (), ())
    assert found.confidence == Confidence.MEDIUM
    assert found.signature.endswith(":no-rank")


def test_two_ranks_against_two_in_a_larger_group_name_nobody_either() -> None:
    """Five ranks, three opinions: the first two are equally large, so no opinion is the right
    one, whichever rank comes first."""
    for sizes in ((16, 16, 20, 20, 24), (24, 20, 20, 16, 16)):
        found = diagnose(reductions(*((numel,) for numel in sizes)).run())
        assert (found.verdict, found.culprits) == (Verdict.HANG, ())


@pytest.mark.parametrize("odd", [0, 3])
def test_one_rank_against_three_is_named(odd: int) -> None:
    sizes = [(16,)] * 4
    sizes[odd] = (20,)
    found = diagnose(reductions(*sizes).run())
    assert (found.verdict, found.culprits) == (Verdict.HANG, (odd,))
    assert found.confidence == Confidence.HIGH


def test_the_only_largest_group_outvotes_the_others_with_less_confidence() -> None:
    found = diagnose(reductions((16,), (16,), (20,), (24,)).run())
    assert (found.verdict, found.culprits) == (Verdict.HANG, (2, 3))
    assert found.confidence == Confidence.MEDIUM


def test_four_ranks_of_four_opinions_name_nobody() -> None:
    found = diagnose(reductions((16,), (20,), (24,), (28,)).run())
    assert (found.verdict, found.culprits) == (Verdict.HANG, ())


# ------------------------------------------------------------------------ by the step before


def test_the_rank_that_departs_from_the_step_before_is_named() -> None:
    found = diagnose(reductions((16, 16), (16, 20)).run())
    assert (found.verdict, found.culprits, found.victims) == (Verdict.HANG, (1,), (0,))
    assert found.confidence == Confidence.MEDIUM


def test_ranks_that_all_depart_from_the_step_before_name_nobody() -> None:
    """What changed between the steps changed for everybody, so the step before acquits no rank
    and accuses none."""
    found = diagnose(reductions((16, 20), (16, 24)).run())
    assert (found.verdict, found.culprits, found.victims) == (Verdict.HANG, (), ())
    assert found.signature.endswith(":no-rank")


def test_two_against_two_is_decided_by_the_step_before() -> None:
    found = diagnose(reductions((16, 16), (16, 20), (16, 16), (16, 20)).run())
    assert (found.verdict, found.culprits) == (Verdict.HANG, (1, 3))


# ------------------------------------------------------------------------ exception or divergence


def raised(time: float) -> Evidence:
    """Rank 0 raises in its second step; at 4.0 and 5.0 ranks 1 and 2 bring different sizes to a
    reduction that rank 0 never comes to."""
    evidence = reductions((16,), (16, 16), (16, 20)).run()
    first = min(c.time for rank in (1, 2) for c in evidence.ranks[rank].collectives[1:])
    assert first == 4.0
    return died(evidence, 0, RankError("IndexError", "index 9", "model.py:40 load", time=time))


def test_an_exception_before_the_divergence_is_the_cause() -> None:
    """What the others did after a rank was gone is no evidence of who went wrong first."""
    found = diagnose(raised(3.5))
    assert (found.verdict, found.culprits, found.victims) == (Verdict.CRASH, (0,), (1, 2))
    assert found.signature == "crash:IndexError:model.py load:one-rank"


@pytest.mark.parametrize("time", [4.5, 0.0])
def test_an_exception_after_the_divergence_or_at_an_unknown_time_is_its_consequence(
    time: float,
) -> None:
    found = diagnose(raised(time))
    assert found.verdict == Verdict.COLLECTIVE_MISMATCH
    assert found.first_divergence is not None
    assert {rank for rank, side in found.first_divergence.ranks.items() if side.op != "none"} == {
        "1",
        "2",
    }
