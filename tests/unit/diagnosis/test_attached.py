"""Verdicts about running jobs that were started without moediag, from looks at their processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence import looks
from moediag.evidence.attached_job import failed_ranks, stall_of
from moediag.evidence.line_conditions import Sources
from moediag.evidence.looks import Looks, RankLook
from moediag.evidence.model import UNTOLD, Evidence, ExitStatus, Frame, RankEvidence, Stack
from moediag.result import Diagnosis

TRAIN = "/home/me/train.py"
C10D = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
SOURCE = """\
def main():
    rank = dist.get_rank()
    if rank == 0:
        dist.all_gather(parts, x)
    if loss > 3:
        dist.all_reduce(x)
    dist.barrier()
    if rank == 0:
        dist.send(x, 1)
    else:
        serve()
    try:
        step()
    except ValueError:
        dist.all_reduce(x)
    queue.get()


def split():
    rank = dist.get_rank()
    if rank == 1:
        dist.all_gather(parts, x)
    else:
        dist.all_reduce(x)
"""
SOURCES = Sources({TRAIN: SOURCE}, 2)


def rank(number: int, line: int, op: str = "", source: Sources = SOURCES) -> RankEvidence:
    """A rank at a line of the program, in a call of torch.distributed."""
    inside = (Frame(C10D, 1, op),) if op else ()
    frames = (*inside, Frame(TRAIN, line, "main" if line < 18 else "split"))
    found, _ = source.conditions(frames)
    return RankEvidence(number, stacks=(Stack("MainThread", "py-spy", frames),), conditions=found)


def waits(still: float = 60.0) -> RankLook:
    return RankLook(10, looks.WAITS, still)


def judged(
    *ranks: RankEvidence, does: Mapping[int, RankLook], world_size: int = 0,
    missing: tuple[int, ...] = (),
) -> Diagnosis:  # fmt: skip
    size = world_size or len(ranks) + len(missing)
    seen = Looks(4.0, 30.0, does, size, missing=missing)
    every = {one.rank: one for one in ranks}
    gone = {r: RankEvidence(r, exit=ExitStatus(signal=UNTOLD)) for r in failed_ranks(seen)}
    return diagnose(Evidence(size, every | gone, foreign=True, stall=stall_of(seen), looks=seen))


BOTH = {0: waits(), 1: waits()}


def test_a_condition_on_the_rank_names_the_rank() -> None:
    found = judged(rank(0, 4, "all_gather"), rank(1, 7, "barrier"), does=BOTH)
    assert (found.verdict, found.culprits, found.victims) == ("hang", (0,), (1,))
    assert "under `if rank == 0` at train.py:3, which keeps rank 1 from it" in found.cause


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (rank(0, 6, "all_reduce"), rank(1, 7, "barrier")),  # it depends on data
        (rank(0, 7, "barrier"), rank(1, 7, "barrier")),  # all at one place
        (rank(0, 9, "send"), rank(1, 7, "barrier")),  # the other side has a branch of its own
        (rank(0, 4, "all_gather", Sources({}, 2)), rank(1, 7, "barrier")),  # no source
    ],
)
def test_stacks_alone_name_nobody(one: RankEvidence, other: RankEvidence) -> None:
    found = judged(one, other, does=BOTH)
    assert (found.verdict, found.culprits) == ("hang", ())
    assert "not known which" in found.cause


def test_a_collective_of_a_sharded_tensor_counts_as_one() -> None:
    found = judged(rank(0, 4, "OpDispatcher.dispatch"), rank(1, 7, "barrier"), does=BOTH)
    assert found.culprits == (0,)


@pytest.mark.parametrize("op", ["recv", "batch_isend_irecv", "Work.wait", "wait"])
def test_a_call_that_may_have_one_other_side_names_nobody(op: str) -> None:
    assert judged(rank(0, 4, op), rank(1, 7, "barrier"), does=BOTH).culprits == ()


def test_two_branches_are_told_and_nobody_is_named() -> None:
    found = judged(rank(0, 24, "all_reduce"), rank(1, 22, "all_gather"), does=BOTH)
    assert (found.verdict, found.culprits) == ("hang", ())
    assert found.next_step == (
        "`if rank == 1` at train.py:21 sends rank 1 to train.py:22 and rank 0 to train.py:24: both "
        "must make the same calls."
    )


def test_a_minority_in_another_call_is_not_at_fault() -> None:
    every = (rank(0, 6, "all_reduce"), *(rank(n, 7, "barrier") for n in (1, 2, 3)))
    found = judged(*every, does={n: waits() for n in range(4)})
    assert (found.verdict, found.culprits) == ("hang", ())


def test_a_call_in_a_handler_names_the_rank() -> None:
    found = judged(rank(0, 15, "all_reduce"), rank(1, 7, "barrier"), does=BOTH)
    assert found.culprits == (0,)
    assert "in the handler `except ValueError`" in found.cause


def test_a_call_in_a_handler_is_not_at_fault_if_another_rank_is_outside_communication() -> None:
    """All ranks may come to that handler, as at the end of the data; the idle one never did."""
    idle = RankLook(11, looks.IDLE, 60.0, stuck=True)
    found = judged(rank(0, 15, "all_reduce"), rank(1, 16), does={0: waits(), 1: idle})
    assert found.culprits == (1,)


def held(why: str, does: str = looks.IDLE) -> RankLook:
    return RankLook(11, does, 5.0, held=why)


@pytest.mark.parametrize(("holder", "named"), [("process 7 (python)", (1,)), ("rank 0", ())])
def test_a_rank_that_is_held_up(holder: str, named: tuple[int, ...]) -> None:
    """Nobody is named where a rank holds the lock in a call that the other one must join."""
    why = f"waits for the lock of the file x.lock, which {holder} holds"
    found = judged(rank(0, 7, "barrier"), rank(1, 16), does={0: waits(5.0), 1: held(why)})
    assert (found.verdict, found.culprits) == ("hang", named)
    assert ("Release the lock" in found.next_step) == (not named)
    assert f"Rank 1, at train.py:16 main, {why}. Rank 0 waits in barrier" in found.cause


def test_a_stopped_rank() -> None:
    stopped = held("is stopped by a signal (SIGSTOP)", looks.STOPPED)
    found = judged(rank(0, 7, "barrier"), rank(1, 7, "barrier"), does={0: waits(5.0), 1: stopped})
    assert (found.verdict, found.culprits) == ("hang", (1,))
    assert found.next_step.endswith("kill -CONT 11")


def test_a_suspended_job_is_not_a_hang() -> None:
    stopped = held("is stopped by a signal (SIGSTOP)", looks.STOPPED)
    found = judged(rank(0, 7, "barrier"), rank(1, 7, "barrier"), does={0: stopped, 1: stopped})
    assert (found.verdict, found.culprits) == ("inconclusive", ())


def test_an_idle_rank_that_the_others_wait_for() -> None:
    idle = RankLook(11, looks.IDLE, 60.0, stuck=True)
    found = judged(rank(0, 7, "barrier"), rank(1, 16), does={0: waits(), 1: idle})
    assert (found.verdict, found.culprits) == ("hang", (1,))


ONE = {"epoch": "1"}


@pytest.mark.parametrize(
    ("own", "others", "named"),
    [
        ({"epoch": "0", "i": "5"}, ({"epoch": "1", "i": "0"}, {"epoch": "1", "i": "0"}), (2,)),
        ({"global_step": "4"}, ({"global_step": "5"}, {"global_step": "7"}), (2,)),
        ({"global_step": "5"}, ({"global_step": "5"}, {"global_step": "6"}), ()),
        ({"global_step": "6"}, ({"global_step": "5"}, {"global_step": "5"}), ()),
        ({**ONE, "step": "4"}, ({**ONE, "step": "5"}, {**ONE, "step": "7"}), (2,)),
        ({**ONE, "step": "4"}, ({**ONE, "step": "5"}, {"epoch": "0", "step": "5"}), ()),
        # Rank 2 may be in the next epoch already.
        ({"step": "4"}, ({"step": "5"}, {"step": "7"}), ()),
        # Of any loop.
        ({**ONE, "i": "4"}, ({**ONE, "i": "5"}, {**ONE, "i": "5"}), ()),
        ({"global_step": "4"}, ({"global_step": "5"}, {}), ()),
        ({"size": "4"}, ({"size": "5"}, {"size": "5"}), ()),  # no counter
        ({}, ({}, {}), ()),
    ],
)
def test_others_in_different_calls_name_an_idle_rank_only_if_all_are_ahead_of_it(
    own: dict[str, str], others: tuple[dict[str, str], ...], named: tuple[int, ...]
) -> None:
    does = {n: replace(waits(), values=values) for n, values in enumerate(others)}
    does[2] = RankLook(11, looks.IDLE, 60.0, stuck=True, values=own)
    found = judged(rank(0, 6, "all_reduce"), rank(1, 7, "barrier"), rank(2, 16), does=does)
    assert (found.verdict, found.culprits) == ("hang", named), found.cause
    assert ("Rank 2 is behind: " in found.cause) == bool(named)


def test_a_short_wait_is_not_a_hang() -> None:
    idle = RankLook(11, looks.IDLE, 6.0)
    found = judged(rank(0, 7, "barrier"), rank(1, 16), does={0: waits(6.0), 1: idle})
    assert (found.verdict, found.culprits) == ("inconclusive", ())
    assert "moediag attach --patience 60" in found.next_step


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (RankLook(11, looks.MOVES), "rank 1 moved on"),
        (RankLook(11, looks.WORKS, words="writes x.pt at 2.5 MB/s"), "rank 1 writes x.pt"),
        (RankLook(11, looks.WORKS, words="computes"), "may also be in an endless loop"),
    ],
)
def test_slow_is_not_hung(does: RankLook, says: str) -> None:
    found = judged(rank(0, 7, "barrier"), rank(1, 16), does={0: waits(), 1: does})
    assert (found.verdict, found.culprits) == ("clean", ())
    assert says in found.cause


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (RankLook(11, looks.WORKS, words="computes"), "rank 1 computes at train.py:16 main"),
        (RankLook(11, looks.MOVES), "rank 1 moved on, last seen at train.py:16 main"),
    ],
)
def test_a_very_long_computation_is_undecided(does: RankLook, says: str) -> None:
    found = judged(rank(0, 7, "barrier"), rank(1, 16), does={0: waits(130.0), 1: does})
    assert (found.verdict, found.culprits) == ("inconclusive", ())
    assert "waited for 130 s: a long computation or an endless loop" in found.cause
    assert says in found.cause


def test_a_condition_that_keeps_out_nobody_here_names_nobody() -> None:
    found = judged(rank(0, 4, "all_gather"), does={0: waits()}, world_size=2)
    assert (found.verdict, found.culprits) == ("inconclusive", ())


def test_a_rank_whose_process_is_gone() -> None:
    found = judged(rank(0, 7, "barrier"), does={0: waits(5.0)}, missing=(1,))
    assert (found.verdict, found.culprits) == ("crash", (1,))


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (
            RankLook(9, looks.WORKS, words="writes model.pt"),
            "writes model.pt",
        ),
        (RankLook(9, looks.MOVES), "moved on"),
        (RankLook(9, looks.IDLE, 60.0), "sleeps"),
    ],
)
@pytest.mark.parametrize("gone", [{}, {1: RankLook(11, looks.GONE)}], ids=["before", "meanwhile"])
def test_a_rank_that_ended_may_have_finished(
    does: RankLook, says: str, gone: dict[int, RankLook]
) -> None:
    some = () if gone else (1,)
    found = judged(rank(0, 16), RankEvidence(1), does={0: does, **gone}, missing=some)
    assert (found.verdict, found.culprits) == ("inconclusive", ())
    assert says in found.cause and "Rank 1 ended before the others" in found.cause


def test_ranks_on_other_machines_may_work() -> None:
    found = judged(rank(0, 7, "barrier"), rank(1, 7, "barrier"), does=BOTH, world_size=4)
    assert (found.verdict, found.culprits) == ("inconclusive", ())
    assert "No process of ranks 2, 3 was found here" in found.cause
    assert "If not, ranks 2, 3 ended" in found.next_step


def test_ranks_that_all_wait_for_their_devices_may_compute() -> None:
    device = RankLook(11, looks.ON_DEVICE, 60.0)
    found = judged(rank(0, 7), rank(1, 7), does={0: device, 1: device})
    assert (found.verdict, found.culprits) == ("inconclusive", ())
    assert "ranks 0, 1 wait for the device at train.py:7 main. From outside" in found.cause
    assert "`moediag watch`, which asks the devices" in found.next_step
    found = judged(rank(0, 7, "barrier"), rank(1, 8), does={0: waits(130.0), 1: device})
    assert (found.verdict, found.culprits) == ("hang", ()), found.cause
    assert "rank 1" in found.cause.lower(), found.cause


def test_ranks_that_cannot_be_read() -> None:
    unread = RankLook(11, looks.UNREAD, 60.0)
    found = judged(RankEvidence(0), RankEvidence(1), does={0: unread, 1: unread})
    assert (found.verdict, found.culprits) == ("inconclusive", ())
    assert "ranks 0, 1 sleep. The Python frames of ranks 0, 1 could not be read." in found.cause


def test_the_table_has_ranks_that_did_the_same_together() -> None:
    numbers = {"step": "3", "began": "1795676211.1144845", "lr": "1e-3", "gpu": "0", "size": "4"}
    does = {n: RankLook(n, looks.WAITS, 60.0 + n, values=numbers) for n in range(3)}
    does[3] = RankLook(9, looks.WORKS, words="computes", cpu=0.98, values={"step": "2"})
    every = (*(rank(n, 7, "barrier") for n in range(3)), rank(3, 16))
    (table,) = judged(*every, does=does).tables
    told = "step=3, lr=1e-3, gpu=0"
    assert table.rows == (
        ("ranks 0..2", "waits in communication", "train.py:7 main", "60 s", "0%", told),
        ("rank 3", "computes", "train.py:16 main", None, "98%", "step=2"),
    )
    does[1] = replace(does[1], gpu=0.4)
    (table,) = judged(*every, does=does).tables
    at = table.columns.index("GPU")
    assert [row[at] for row in table.rows] == ["40%", None]


def test_a_job_that_ended_meanwhile() -> None:
    ended = RankLook(11, looks.GONE)
    found = judged(RankEvidence(0), RankEvidence(1), does={0: ended, 1: ended})
    assert found.verdict == "inconclusive"
    assert found.cause == "The job ended while it was being examined."
