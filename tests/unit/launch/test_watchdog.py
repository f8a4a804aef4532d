"""The watchdog on simulated samples: hangs, and cases that only resemble one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from moediag.evidence.model import Stall
from moediag.launch.follow.watchdog import Watchdog
from moediag.launch.rank_sample import RankSample, states

WINDOW = 3.0
STEP = 0.03
WAITS = RankSample(0, state="in-collective", progress=7, time=101.5)
ELSEWHERE = RankSample(1, state="running", progress=6, time=101.0)

Script = Callable[[float], Sequence[RankSample]]


def watch(script: Script, seconds: float = 10.0, dog: Watchdog | None = None) -> Stall | None:
    """Returns the first stall for ``script`` (samples by seconds since the first)."""
    dog = dog or Watchdog(WINDOW, started=100.0)
    for tick in range(int(seconds / STEP)):
        if stall := dog.observe(tick * STEP, script(tick * STEP)):
            return stall
    return None


def test_a_hang_lists_the_waiting_ranks_and_its_start() -> None:
    stall = watch(lambda _: [WAITS, ELSEWHERE])
    assert stall == Stall(at=1.5, window=WINDOW, waiting=(0,), elsewhere=(1,))


def test_waiting_for_a_rank_that_finished_is_a_hang() -> None:
    stall = watch(lambda _: [WAITS, replace(ELSEWHERE, alive=False, state="finished")])
    assert stall is not None
    assert stall.elsewhere == (1,)


def test_the_recorder_thread_does_not_count_as_work() -> None:
    assert watch(lambda t: [WAITS, replace(ELSEWHERE, cpu=0.001 * t)]) is not None


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(lambda t: [WAITS, replace(ELSEWHERE, progress=int(t))], id="progress"),
        pytest.param(lambda t: [WAITS, replace(ELSEWHERE, cpu=t)], id="cpu"),
        pytest.param(lambda t: [WAITS, replace(ELSEWHERE, cpu=0.1 * t)], id="a-tenth-of-a-cpu"),
        pytest.param(lambda _: [WAITS, replace(ELSEWHERE, runnable=True)], id="starved-of-cpu"),
        pytest.param(lambda _: [WAITS, RankSample(1, known=False)], id="not-started"),
        pytest.param(lambda _: [replace(WAITS, state="running"), ELSEWHERE], id="no-collective"),
        pytest.param(
            lambda _: [replace(s, alive=False) for s in (WAITS, ELSEWHERE)], id="all-ended"
        ),
    ],
)
def test_cases_that_are_not_a_hang(script: Script) -> None:
    assert watch(script) is None


def test_the_window_restarts_with_each_progress() -> None:
    def script(t: float) -> Sequence[RankSample]:
        return [WAITS, replace(ELSEWHERE, progress=int(t > WINDOW - 0.5))]

    assert watch(script, 2 * WINDOW - 1) is None
    assert watch(script, 2 * WINDOW) is not None


def test_a_suspended_watchdog_does_not_judge() -> None:
    dog = Watchdog(WINDOW, started=100.0)
    assert [dog.observe(t, [WAITS, ELSEWHERE]) for t in (0.0, 60.0, 120.0)] == [None] * 3


def test_stacks_are_read_once_per_window() -> None:
    asked: list[list[int]] = []

    def blocked(ranks: Sequence[int]) -> Sequence[int]:
        asked.append(list(ranks))
        return (1,) if len(asked) == 2 else ()

    dog = Watchdog(WINDOW, started=100.0, blocked=blocked)
    stall = watch(lambda _: [replace(WAITS, state="running"), ELSEWHERE], 8.0, dog)
    assert stall is not None
    assert stall.waiting == (1,)
    assert asked == [[0, 1], [0, 1]]


def test_states_are_reported_for_the_display() -> None:
    shown = states([WAITS, replace(ELSEWHERE, alive=False), RankSample(2, known=False)])
    assert shown == {0: "in-collective", 1: "exited", 2: "starting"}


# ------------------------------------------------------------------------ ranks that spin on GPUs


def on_gpus(
    waits: dict[int, bool],
    seconds: float,
    busy: bool = True,
    moves: bool = False,
    recorded: bool = True,
) -> tuple[object, list[list[int]]]:
    """Returns the stall within ``seconds``, and the ranks examined.

    A rank that waits for its GPU uses the CPU all the time."""
    looked: list[list[int]] = []

    def spinning(ranks: Sequence[int]) -> list[int]:
        looked.append(list(ranks))
        return [rank for rank in ranks if waits.get(rank)]

    dog = Watchdog(1.0, 0.0, spinning=spinning)
    now, found = 0.0, None
    while now < seconds and found is None:
        samples = [
            RankSample(
                rank, state="running", progress=(int(now * 10) if moves else 7) if recorded else -1,
                cpu=now if busy else 0.0, runnable=busy,
            )
            for rank in waits
        ]  # fmt: skip
        found = dog.observe(now, samples)
        now += 0.1
    return found, looked


def test_spinning_on_gpus_is_a_hang() -> None:
    found, looked = on_gpus({0: True, 1: True}, 60.0)
    assert found is not None and found.waiting == (0, 1)  # type: ignore[attr-defined]
    assert looked == [[0, 1]]


def test_sleeping_on_gpus_is_a_hang() -> None:
    found, _ = on_gpus({0: True, 1: True}, 60.0, busy=False)
    assert found is not None


def test_computation_on_the_host_is_not_a_hang() -> None:
    found, looked = on_gpus({0: True, 1: False}, 31.0)
    assert found is None
    assert 2 <= len(looked) <= 4, "looked at rarely: each look stops the ranks"


def test_ranks_without_a_recorder_are_not_judged() -> None:
    assert on_gpus({0: True, 1: True}, 60.0, recorded=False) == (None, [])


def test_ranks_with_new_records_are_not_examined() -> None:
    assert on_gpus({0: True, 1: True}, 30.0, moves=True) == (None, [])
