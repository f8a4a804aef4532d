"""Ranks that wait before the first call of a job or after its last."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.model import (
    Evidence,
    ExitStatus,
    Frame,
    Meeting,
    RankEvidence,
    Stack,
    Stall,
    Worker,
)

LIBRARY = "/usr/lib/python3.11"
SITE = "/env/lib/python3.11/site-packages"
C10D = f"{SITE}/torch/distributed/distributed_c10d.py"
MAIN = Frame("/home/me/train.py", 40, "<module>")
MEETS = (Frame(C10D, 1850, "init_process_group"), Frame("/home/me/train.py", 20, "main"), MAIN)
WAITS = (Frame("/home/me/train.py", 12, "wait_for_data"), MAIN)
SHUTDOWN = (Frame(f"{LIBRARY}/threading.py", 1590, "_shutdown"),)
LOGS = (
    Frame(f"{LIBRARY}/queue.py", 171, "Queue.get"),
    Frame("/home/me/train.py", 9, "drain"),
    Frame(f"{LIBRARY}/threading.py", 1002, "Thread._bootstrap"),
)


def job(stall: Stall | None, *stacks: tuple[tuple[Frame, ...], ...], **more: object) -> Evidence:
    """A job in which each rank has ``stacks``, the main thread's first; () of one that ended."""
    ranks = {
        rank: RankEvidence(
            rank,
            stacks=tuple(
                Stack("MainThread" if n == 0 else f"logger-{n}", "py-spy", frames)
                for n, frames in enumerate(those)
            ),
            exit=None if those else ExitStatus(code=0),
            libraries=(LIBRARY, SITE),
        )
        for rank, those in enumerate(stacks)
    }
    made: dict[str, object] = {"watched": True, "stall": stall, "backend": "gloo", **more}
    return Evidence(len(ranks), ranks, **made)  # type: ignore[arg-type]


LATE = Stall(4.0, 12.0, (0,), (1,))
LEFT = Stall(4.0, 12.0, (), (1,))


def test_a_rank_that_never_comes_to_the_rendezvous_is_named_with_its_line() -> None:
    found = diagnose(job(LATE, (MEETS,), (WAITS,)))
    assert (found.verdict, found.culprits, found.victims) == ("hang", (1,), (0,))
    assert found.confidence == "medium"
    assert "Rank 1 has not called init_process_group, where rank 0 waits." in found.cause
    assert "train.py:12 wait_for_data" in found.cause
    assert "train.py:12" in found.next_step


def test_ranks_that_are_all_in_the_rendezvous_blame_none() -> None:
    found = diagnose(job(LATE, (MEETS,), (MEETS,)))
    assert (found.verdict, found.culprits) == ("hang", ())


def test_without_a_stack_of_those_that_wait_nothing_is_said_of_the_rendezvous() -> None:
    found = diagnose(job(LATE, ((),), (WAITS,)))
    assert "init_process_group" not in found.cause


def told(evidence: Evidence, *meetings: Meeting) -> Evidence:
    ranks = {
        rank: replace(seen, meeting=meeting)
        for (rank, seen), meeting in zip(evidence.ranks.items(), meetings, strict=True)
    }
    return replace(evidence, ranks=ranks)


HERE = Meeting("gloo", "127.0.0.1:29500", 2)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (replace(HERE, world_size=3), "the world size is 2 on rank 0, 3 on rank 1."),
        (replace(HERE, address="127.0.0.1:1"), "store is 127.0.0.1:29500 on rank 0, 127.0.0.1:1 "),
        (replace(HERE, backend="nccl"), "the backend is gloo on rank 0, nccl on rank 1."),
    ],
)
def test_what_ranks_were_told_differently_is_why_they_do_not_meet(
    other: Meeting, says: str
) -> None:
    found = diagnose(told(job(Stall(4.0, 12.0, (0, 1)), (MEETS,), (MEETS,)), HERE, other))
    assert (found.verdict, found.culprits) == ("hang", ())
    assert says in found.cause


@pytest.mark.parametrize("other", [HERE, Meeting(), replace(HERE, address="node-0:29500")])
def test_ranks_that_were_told_the_same_do_not_meet_for_another_reason(other: Meeting) -> None:
    found = diagnose(told(job(Stall(4.0, 12.0, (0, 1)), (MEETS,), (MEETS,)), HERE, other))
    assert "cannot find each other. The evidence does not show why" in found.cause


@pytest.mark.parametrize(
    ("stacks", "says"),
    [
        ((SHUTDOWN, LOGS), "waits for the thread 'logger-1' (train.py:9 drain)."),
        ((SHUTDOWN,), "waits for a thread to end."),
        (
            ((Frame(f"{LIBRARY}/multiprocessing/util.py", 360, "_exit_function"),),),
            "waits for its child processes to end. Its worker process 42 is at train.py:9 drain.",
        ),
        (
            ((Frame("/home/me/train.py", 31, "flush"),),),
            "is still in an exit handler (atexit) at train.py:31 flush.",
        ),
        (
            ((Frame(C10D, 2300, "destroy_process_group"), MAIN),),
            "Rank 1 waits in destroy_process_group at train.py:40 <module>.",
        ),
    ],
)
def test_a_rank_that_does_not_end_is_named_with_what_it_waits_for(
    stacks: tuple[tuple[Frame, ...], ...], says: str
) -> None:
    evidence = job(LEFT, (), stacks)
    child = (*LOGS[:2], Frame(f"{LIBRARY}/multiprocessing/process.py", 314, "_bootstrap"), MAIN)
    worker = Worker(42, (Stack("MainThread", "py-spy", child),))
    object.__setattr__(evidence.ranks[1], "workers", (worker,))
    found = diagnose(evidence)
    assert (found.verdict, found.culprits, found.victims) == ("hang", (1,), ())
    assert found.confidence == "medium"
    assert says in found.cause
    assert found.cause.endswith("Rank 0 ended with exit code 0.")


def test_a_rank_whose_program_runs_after_its_peers_ended_is_named_with_its_line() -> None:
    found = diagnose(job(LEFT, (), (WAITS,)))
    assert (found.verdict, found.culprits, found.victims) == ("hang", (1,), ())
    assert found.cause == (
        "Rank 1 still runs. Rank 1 is at train.py:12 wait_for_data. Rank 0 ended with exit code 0."
    )
    assert "train.py:12" in found.next_step


@pytest.mark.parametrize("finished", [True, False])
def test_a_peer_that_the_program_started_itself_has_no_exit_code(finished: bool) -> None:
    """It ended if it told its end; without that, it may have lost the connection to its files."""
    evidence = job(LEFT, (), (WAITS,))
    object.__setattr__(evidence.ranks[0], "exit", None)
    object.__setattr__(evidence.ranks[0], "finished", finished)
    found = diagnose(evidence)
    assert (found.verdict, found.culprits) == (("hang", (1,)) if finished else ("inconclusive", ()))
    assert found.cause.endswith("Rank 0 ended.") is finished


def test_a_rank_whose_program_runs_while_its_peers_do_is_not_at_its_end() -> None:
    found = diagnose(job(replace(LEFT, elsewhere=(0, 1)), (WAITS,), (WAITS,)))
    assert (found.verdict, found.culprits) == ("inconclusive", ())


def test_without_a_stack_nothing_is_said_of_the_end() -> None:
    assert diagnose(job(LEFT, (), ((),))).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("evidence", "says"),
    [
        (job(LATE, (MEETS,), (WAITS,), interrupted=True), "Rank 1 has not called init_process"),
        (job(LEFT, (), (SHUTDOWN, LOGS), interrupted=True), "the thread 'logger-1' (train.py:9"),
    ],
)
def test_an_interruption_tells_both_and_blames_none(evidence: Evidence, says: str) -> None:
    found = diagnose(evidence)
    assert (found.verdict, found.culprits) == ("inconclusive", ())
    assert says in found.cause
