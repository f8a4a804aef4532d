"""Ranks that do not meet in ``init_process_group``. The frames are those that py-spy showed of
ranks that torchrun of torch 2.13.0 had started again, on gloo."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.model import (
    Collective,
    Evidence,
    ExitStatus,
    Frame,
    Meeting,
    RankError,
    RankEvidence,
    Stack,
    Stall,
)

C10D = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
INSIDE = (
    Frame(C10D, 2169, "_new_process_group_helper"),
    Frame(C10D, 1899, "init_process_group"),
    Frame("/home/me/train.py", 2, "<module>"),
)
ELSEWHERE = (Frame("/home/me/train.py", 1, "download"), Frame("/home/me/train.py", 9, "<module>"))
REFUSED = RankError(
    "RuntimeError",
    "Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: Connection refused",
    "train.py:2 <module>",
    frames=INSIDE,
)


def waits(*frames: tuple[Frame, ...], restart: int | None = 0, torch: str = "2.13.0") -> Evidence:
    """A watched job whose ranks have these stacks; () for none."""
    ranks = {
        rank: RankEvidence(
            rank,
            stacks=(Stack("MainThread", "py-spy", one),) if one else (),
            versions={"torch": torch},
            restart=restart,
        )
        for rank, one in enumerate(frames)
    }
    stall = Stall(at=2.0, window=3.0, waiting=tuple(ranks))
    return Evidence(len(ranks), ranks, watched=True, stall=stall)


def test_ranks_that_were_never_started_again_abstain() -> None:
    found = diagnose(waits(INSIDE, INSIDE))
    assert (found.verdict, found.culprits, found.victims) == ("hang", (), (0, 1))
    assert found.confidence == "low"
    assert "cannot find each other" in found.cause
    assert "does not show why" in found.cause
    assert "MASTER_PORT" in found.next_step


def test_ranks_started_again_share_the_store_of_those_before_them() -> None:
    found = diagnose(waits(INSIDE, INSIDE, restart=2))
    assert (found.verdict, found.culprits, found.confidence) == ("hang", (), "medium")
    assert "torchrun has restarted the ranks (restart 2)" in found.cause
    assert "TORCHELASTIC_RESTART_COUNT" in found.next_step


@pytest.mark.parametrize(
    ("restart", "torch"), [(None, "2.13.0"), (0, "2.13.0"), (2, "2.5.1"), (2, "unknown"), (2, "")]
)
def test_the_store_is_not_blamed_without_a_restart_or_by_a_torch_that_has_prefixes(
    restart: int | None, torch: str
) -> None:
    found = diagnose(waits(INSIDE, INSIDE, restart=restart, torch=torch))
    assert "restart" not in found.cause


def test_a_rank_elsewhere_is_another_hang() -> None:
    assert "find each other" not in diagnose(waits(INSIDE, ELSEWHERE)).cause


def test_a_rank_without_a_stack_may_be_missing() -> None:
    found = diagnose(waits(INSIDE, INSIDE, (), restart=2))
    assert (found.verdict, found.culprits, found.confidence) == ("hang", (), "low")
    assert "nothing is known of rank 2" in found.cause
    assert "restart" not in found.cause


def test_ranks_that_made_calls_have_met() -> None:
    evidence = waits(INSIDE, INSIDE)
    call = Collective(0, "world", 0, "all_reduce", 8, 8, "float32")
    ranks = {rank: replace(seen, collectives=(call,)) for rank, seen in evidence.ranks.items()}
    assert "find each other" not in diagnose(replace(evidence, ranks=ranks)).cause


@pytest.mark.parametrize("restart", [0, 2])
def test_a_refused_connection_of_a_restart_has_the_same_cause(restart: int) -> None:
    evidence = replace(waits((), (), restart=restart), stall=None)
    ranks = {
        rank: replace(seen, error=REFUSED, exit=ExitStatus(code=1))
        for rank, seen in evidence.ranks.items()
    }
    found = diagnose(replace(evidence, ranks=ranks))
    assert (found.verdict, found.culprits) == ("crash", ())
    assert ("store of the ranks before them" in found.cause) == (restart == 2)
    assert ("TORCHELASTIC_RESTART_COUNT" in found.next_step) == (restart == 2)


def test_a_connection_lost_later_is_not_blamed_on_the_store() -> None:
    lost = replace(REFUSED, frames=ELSEWHERE)
    evidence = replace(waits((), (), restart=2), stall=None)
    ranks = {
        rank: replace(seen, error=lost, exit=ExitStatus(code=1))
        for rank, seen in evidence.ranks.items()
    }
    assert "restart" not in diagnose(replace(evidence, ranks=ranks)).cause


@pytest.mark.parametrize(
    ("sizes", "culprits"),
    [((3, 4, 3), (1,)), ((2, 4), ()), ((3, 4, 5), ()), ((3, 3, 3), ()), ((0, 4, 0), ())],
)
def test_a_rank_that_was_told_to_meet_otherwise_than_most(
    sizes: tuple[int, ...], culprits: tuple[int, ...]
) -> None:
    """0: it is not known what the rank was told."""
    evidence = waits(*[INSIDE for _ in sizes])
    ranks = {
        rank: replace(seen, meeting=Meeting(world_size=sizes[rank]))
        for rank, seen in evidence.ranks.items()
    }
    found = diagnose(replace(evidence, ranks=ranks))
    assert found.culprits == culprits
    assert ("It is not known which of them is wrong" in found.cause) == (
        not culprits and len({*sizes} - {0}) > 1
    )
