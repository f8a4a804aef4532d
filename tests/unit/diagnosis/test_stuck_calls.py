"""The position of a stalled job without recorded schedules, from stacks only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moediag.diagnosis.schedules.align import Aligned
from moediag.diagnosis.schedules.stuck_calls import Frontier, frontier
from moediag.evidence.model import Evidence, Frame, RankEvidence, Stack, Stall

C10D = "/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"


def waiting(operation: str, line: int, user: str = "/home/u/train.py") -> Stack:
    frames = (
        Frame("/lib/libgloo.so", 0, "gloo::wait", native=True),
        Frame(C10D, 2800, operation),
        Frame(C10D, 83, "wrapper"),
        Frame(user, line, "step"),
        Frame(user, 99, "<module>"),
    )
    return Stack("MainThread", "py-spy", frames)


def job(*stacks: Stack | None) -> Evidence:
    ranks = {
        rank: RankEvidence(rank, stacks=() if stack is None else (stack,))
        for rank, stack in enumerate(stacks)
    }
    return Evidence(len(stacks), ranks, stall=Stall(1.0, 3.0, tuple(ranks)))


def of(*stacks: Stack | None) -> Frontier | None:
    return frontier(Aligned(), job(*stacks))


MOST, ODD = waiting("all_reduce", 12), waiting("barrier", 30)


def test_the_rank_at_a_different_line_is_suspected() -> None:
    assert of(MOST, ODD, MOST, MOST) == Frontier(
        "stack",
        suspects=(1,),
        ahead=(0, 2, 3),
        where=(
            "wrapper, called by step (train.py:30)",
            "wrapper, called by step (train.py:12)",
        ),
    )


def test_two_ranks_at_the_same_different_line_are_suspected() -> None:
    found = of(ODD, MOST, MOST, ODD, MOST)
    assert found is not None
    assert (found.basis, found.suspects, found.ahead) == ("stack", (0, 3), (1, 2, 4))


@pytest.mark.parametrize(
    "stacks",
    [
        (MOST, MOST, MOST),  # all at one place
        (MOST, MOST, ODD, ODD),  # two against two
        (MOST, MOST, MOST, ODD, waiting("barrier", 31)),  # the others stand apart from each other
    ],
    ids=["nobody", "tie", "several places"],
)
def test_no_rank_is_suspected_without_a_clear_minority(stacks: tuple[Stack, ...]) -> None:
    assert of(*stacks) == Frontier()


def test_fewer_than_three_ranks_in_communication_are_not_compared() -> None:
    assert of(MOST, ODD) is None
    assert of(MOST, None, None, ODD) is None
    assert of(MOST, MOST, ODD) is not None
    computing = Stack("MainThread", "py-spy", (Frame("/home/u/train.py", 5, "load"),))
    assert of(MOST, ODD, computing) is None


def test_a_stack_without_user_code_is_described_by_its_operation() -> None:
    bare = replace(MOST, frames=MOST.frames[:2])
    other = replace(ODD, frames=ODD.frames[:2])
    found = of(bare, bare, other)
    assert found is not None
    assert found.where == ("barrier", "all_reduce")


def test_ranks_outside_communication_are_left_to_the_watchdog() -> None:
    apart = job(MOST, ODD, MOST, MOST)
    assert apart.stall is not None
    elsewhere = replace(apart.stall, waiting=(0, 2, 3), elsewhere=(1,))
    assert frontier(Aligned(), replace(apart, stall=elsewhere)) is None
