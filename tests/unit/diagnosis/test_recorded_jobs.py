"""Watched jobs that ended by themselves: what they left shows whether their ranks agreed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.model import Condition, Evidence, ExitStatus, Left, RankEvidence
from moediag.result import Confidence, Verdict
from tests.unit.evidence_builder import Job, Op

CLOSED = "RuntimeError: Connection closed by peer [127.0.0.1]:4321"


def ended(*counts: int, failing: bool = False, whole: bool = True) -> Evidence:
    """A watched job whose ranks made this many reductions on one group, and all ended normally.
    ``failing``: those that not all ranks made failed, else they count as completed."""
    world = Job(
        {"0": (tuple(range(len(counts))), "dp")},
        [[Op("0", step=step) for step in range(1, n + 1)] for n in counts],
    ).whole()
    ranks = {}
    for rank, seen in world.ranks.items():
        calls = tuple(
            replace(
                call,
                site="train.py:12 step",
                completed=not failing or call.position < min(counts),
                failed=CLOSED if failing and call.position >= min(counts) else "",
            )
            for call in seen.collectives
        )
        lost = () if whole else ("collectives: the recorder failed: ValueError()",)
        ranks[rank] = replace(seen, collectives=calls, not_seen=lost)
    return replace(world, ranks=ranks, watched=True)


@pytest.mark.parametrize("failing", [True, False])
def test_unequal_call_counts_are_a_mismatch(failing: bool) -> None:
    found = diagnose(ended(5, 3, 5, failing=failing))
    assert (found.verdict, found.culprits) == (Verdict.COLLECTIVE_MISMATCH, (1,))
    assert found.victims == (0, 2)
    assert "ranks 0, 2 made 5 calls, rank 1 only 3" in found.cause
    assert "did not make is all_reduce at train.py:12 step" in found.cause
    assert ("Connection closed by peer" in found.cause) == failing
    assert "agree" not in found.cause


def test_equal_call_counts_are_clean() -> None:
    found = diagnose(ended(5, 5, 5))
    assert (found.verdict, found.culprits) == (Verdict.CLEAN, ())


def test_call_counts_of_an_incomplete_log_are_not_compared() -> None:
    assert diagnose(ended(5, 3, 5, whole=False)).verdict == Verdict.CLEAN


def test_of_two_ranks_neither_is_named_for_a_repeated_call() -> None:
    """Rank 1 had too few batches, or rank 0 too many."""
    found = diagnose(ended(5, 3))
    assert (found.verdict, found.culprits) == (Verdict.COLLECTIVE_MISMATCH, ())
    assert "rank 0 made 5 calls, rank 1 only 3" in found.cause


def one_call_more(callers: tuple[str, ...] = (), **known: object) -> Evidence:
    """Rank 0 of two makes one call at the end that rank 1 never makes."""
    evidence = ended(5, 5)
    seen = evidence.ranks[0]
    last = replace(
        seen.collectives[-1], index=5, position=5, site="train.py:40 main", time=99.0,
        callers=callers,
    )  # fmt: skip
    extra = replace(seen, collectives=(*seen.collectives, last), **known)
    return replace(evidence, ranks={**evidence.ranks, 0: extra})


def test_of_two_ranks_neither_is_named_for_a_call_that_one_of_them_never_made() -> None:
    """Rank 0 made one too many, or rank 1 one too few."""
    found = diagnose(one_call_more())
    assert (found.verdict, found.culprits) == (Verdict.COLLECTIVE_MISMATCH, ())
    assert "rank 1 did not make is all_reduce at train.py:40 main" in found.cause


def test_a_condition_around_a_line_that_led_to_the_call_decides() -> None:
    """``if rank == 0: finish()``: the call itself is made in a library."""
    alone = Condition(
        "train.py", 59, "if rank == 0", "under", True, keeps_out=frozenset({1}), singles=0
    )
    line = "train.py:60 <module>"
    found = diagnose(one_call_more((line,), conditions={line: (alone,)}))
    assert (found.culprits, found.confidence) == ((0,), Confidence.MEDIUM)
    assert "if rank == 0" in found.next_step and "train.py:59" in found.next_step
    # A condition that all ranks meet alike says nothing.
    every = replace(
        alone, text="if epoch == 0", names_rank=False, keeps_out=frozenset(), singles=None
    )
    assert diagnose(one_call_more((line,), conditions={line: (every,)})).culprits == ()


def test_one_rank_against_many_that_ended_made_the_extra_call() -> None:
    assert diagnose(ended(5, 6, 5)).culprits == (1,)


def test_failed_calls_are_a_finding_although_the_counts_are_equal() -> None:
    evidence = ended(5, 5)
    seen = evidence.ranks[1]
    calls = (*seen.collectives[:-1], replace(seen.collectives[-1], completed=False, failed=CLOSED))
    found = diagnose(
        replace(evidence, ranks={**evidence.ranks, 1: replace(seen, collectives=calls)})
    )
    assert (found.verdict, found.culprits) == (Verdict.CRASH, ())
    assert "On rank 1, all_reduce at train.py:12 step" in found.cause
    assert CLOSED in found.cause and "the program continued" in found.cause
    assert found.signature == "crash:failed call:no-rank"


def test_an_exit_code_after_a_failed_call_is_no_crash_of_its_own() -> None:
    """A framework (hydra) turned the exception of the lost connection into an exit code."""
    evidence = ended(5, 3, failing=True)
    ranks = {
        0: replace(evidence.ranks[0], exit=ExitStatus(code=1)),
        1: evidence.ranks[1],
    }
    found = diagnose(replace(evidence, ranks=ranks, deaths=(0,)))
    assert (found.verdict, found.culprits) == (Verdict.COLLECTIVE_MISMATCH, ())
    assert "rank 1 reached the end without that call" in found.cause
    # Without a failed call the exit code is the rank's own.
    calls = tuple(replace(c, completed=True, failed="") for c in ranks[0].collectives)
    own = {**ranks, 0: replace(ranks[0], collectives=calls)}
    found = diagnose(replace(evidence, ranks=own, deaths=(0,)))
    assert found.culprits == (0,)
    assert "ended with exit code 1 and left no exception" in found.cause
    own[0] = replace(own[0], left=Left("os._exit(1)", ("train.py:9 step",)))
    found = diagnose(replace(evidence, ranks=own, deaths=(0,)))
    assert "ended with exit code 1 by os._exit(1) at train.py:9" in found.cause
    assert found.next_step == "Find out why rank 0 ends there: os._exit(1) at train.py:9."
    under = Condition("train.py", 7, "if bad(x)", "under")
    own[0] = replace(own[0], conditions={"train.py:9 step": (under,)})
    found = diagnose(replace(evidence, ranks=own, deaths=(0,)))
    assert found.next_step.endswith("at train.py:9, under `if bad(x)` at train.py:7.")


# ------------------------------------------------------------------------ no process group


def without_group(*optimizers: tuple[str, ...] | None) -> Evidence:
    ranks = {rank: RankEvidence(rank, alone=own) for rank, own in enumerate(optimizers)}
    return Evidence(len(optimizers), ranks, watched=True)


def test_ranks_that_trained_without_a_process_group_trained_alone() -> None:
    found = diagnose(without_group(("AdamW",), ("AdamW",)))
    assert (found.verdict, found.culprits) == (Verdict.REPLICA_DIVERGENCE, ())
    assert "WORLD_SIZE is 2" in found.cause and "(AdamW)" in found.cause
    assert "each rank trained alone" in found.cause


@pytest.mark.parametrize(
    "evidence",
    [
        without_group((), ()),  # a job that trains nothing, such as preprocessing by rank
        without_group(("AdamW",), None),  # the other rank's end is unknown
        without_group(("AdamW",)),
    ],
)
def test_ranks_that_may_not_have_trained_alone_are_not_accused(evidence: Evidence) -> None:
    assert diagnose(evidence).verdict == Verdict.INCONCLUSIVE


def test_a_rank_that_was_recorded_did_not_train_alone() -> None:
    evidence = ended(3, 3)
    assert diagnose(evidence).verdict == Verdict.CLEAN


def mesh(steps_of_rank_3: int) -> Evidence:
    """A watched job of two tensor-parallel pairs; each rank reduces with the other pair, too."""
    groups: dict[str, tuple[tuple[int, ...], str | None]] = {
        "t0": ((0, 1), "tp"), "t1": ((2, 3), "tp"), "d0": ((0, 2), "dp"), "d1": ((1, 3), "dp"),
    }  # fmt: skip
    programs = [
        [
            op
            for step in range(1, (steps_of_rank_3 if rank == 3 else 5) + 1)
            for op in (Op(f"t{rank // 2}", step=step), Op(f"d{rank % 2}", step=step))
        ]
        for rank in range(4)
    ]
    return replace(Job(groups, programs).run(), watched=True)


def test_a_rank_that_two_ranks_wait_for_in_two_groups_left_out_a_step() -> None:
    found = diagnose(mesh(4))
    assert (found.verdict, found.culprits, found.victims) == (Verdict.HANG, (3,), (0, 1, 2))
    assert found.confidence == "medium"
    assert diagnose(mesh(5)).verdict == Verdict.CLEAN


def test_one_of_two_that_ended_first_is_not_named_without_another_witness() -> None:
    evidence = mesh(4)
    ranks = {**evidence.ranks, 2: RankEvidence(2, exit=ExitStatus(signal="SIGTERM", by_us=True))}
    found = diagnose(replace(evidence, ranks=ranks))
    assert found.culprits == ()
