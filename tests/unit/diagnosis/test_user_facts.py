"""Batches, handled exceptions and workers in the words of a diagnosis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.model import BatchCount, Evidence, Frame, RankError, Stack, Stall, Worker
from tests.unit.evidence_builder import Job, Op

GROUP: dict[str, tuple[tuple[int, ...], str | None]] = {"a": ((0, 1), "world")}
LINE = "train.py:88 epoch"
LOADER = Frame("/env/lib/python3.12/site-packages/torch/utils/data/dataloader.py", 9, "get")
LOOP = Frame("/env/lib/python3.12/site-packages/torch/utils/data/_utils/worker.py", 9, "loop")


def with_batches(*passes: tuple[BatchCount, ...]) -> Evidence:
    """Rank 0 waits in all_reduce, rank 1 in barrier, after these passes over their loaders."""
    evidence = Job(GROUP, [[Op("a")], [Op("a", "barrier", numel=0)]]).run()
    ranks = {r: replace(evidence.ranks[r], batches=own) for r, own in enumerate(passes)}
    return replace(evidence, ranks=ranks, watched=True)


def done(number: int, line: str = LINE) -> BatchCount:
    return BatchCount(line, number, ended=True)


def going(number: int) -> BatchCount:
    return BatchCount(LINE, number, ended=False)


class TestBatches:
    def test_a_rank_whose_loader_ended_earlier(self) -> None:
        found = diagnose(with_batches((going(32),), (done(31),)))
        assert "The data loader at train.py:88 gave 31 batches on rank 1, at least 32 batches on " \
            "rank 0." in found.cause  # fmt: skip
        assert found.next_step.startswith(
            "Give all ranks the same number of batches at train.py:88"
        )

    def test_two_loaders_that_ended(self) -> None:
        found = diagnose(with_batches((done(32),), (done(31), done(5, "train.py:99 test"))))
        assert "gave 31 batches on rank 1, 32 batches on rank 0" in found.cause

    def test_the_first_pass_that_differs_is_told(self) -> None:
        found = diagnose(with_batches((done(9), done(20), done(3)), (done(9), done(15), done(2))))
        assert "gave 15 batches on rank 1, 20 batches on rank 0" in found.cause

    @pytest.mark.parametrize(
        "passes",
        [
            ((done(32),), (done(32),)),
            ((going(31),), (done(31),)),  # it may end now as well
            ((going(12),), (going(14),)),
            ((done(32),), ()),
            ((), ()),
            ((done(32),), (done(31, "train.py:99 test"),)),  # another loader
            ((done(32), done(30)), (done(32),)),  # the second pass of one rank alone
        ],
    )
    def test_loaders_that_may_have_given_equally_many(
        self, passes: tuple[tuple[BatchCount, ...], ...]
    ) -> None:
        assert "batches" not in diagnose(with_batches(*passes)).cause


class TestHandledExceptions:
    def test_a_rank_in_a_handler(self) -> None:
        evidence = with_batches((), ())
        error = RankError("ValueError", "corrupt\n sample", "train.py:7 load")
        ranks = {**evidence.ranks, 1: replace(evidence.ranks[1], handling=error)}
        found = diagnose(replace(evidence, ranks=ranks))
        assert (
            "Rank 1 is handling an exception (ValueError: corrupt sample, raised at train.py:7 "
            "load)." in found.cause
        )

    def test_no_rank_in_a_handler(self) -> None:
        assert "handling" not in diagnose(with_batches((), ())).cause


class TestEndedThreads:
    def evidence(self, *errors: tuple[int, RankError], calls: int = 1) -> Evidence:
        """Rank 1 makes ``calls`` calls after second 1; the newest call of the job is at 2 s."""
        evidence = with_batches((), ())
        ranks = dict(evidence.ranks)
        for rank, error in errors:
            ranks[rank] = replace(ranks[rank], thread_errors=(*ranks[rank].thread_errors, error))
        for rank, seen in ranks.items():
            last = replace(seen.collectives[-1], time=2.0)
            ranks[rank] = replace(seen, collectives=(last,) * calls)
        return replace(evidence, ranks=ranks)

    ERROR = RankError("KeyError", "'x'", "server.py:7 send", 1.0, thread="sender")

    @pytest.mark.parametrize(
        ("kind", "text", "named"),
        [
            ("RuntimeError", "[gloo/x.cc:553] Connection closed by peer", ()),
            ("RuntimeError", "the queue is full", (1,)),
        ],
    )
    def test_a_thread_that_lost_another_rank_names_nobody(
        self, kind: str, text: str, named: tuple[int, ...]
    ) -> None:
        error = replace(self.ERROR, type=kind, message=text)
        found = diagnose(self.evidence((1, error)))
        assert found.culprits == named
        assert "The thread 'sender' of rank 1 ended" in found.cause

    def test_a_rank_that_lost_a_thread_before_the_job_stood_still(self) -> None:
        found = diagnose(self.evidence((1, self.ERROR)))
        assert (found.culprits, found.victims, found.confidence) == ((1,), (0,), "low")
        assert found.cause.endswith(
            "The thread 'sender' of rank 1 ended with KeyError: 'x', raised at server.py:7 send."
        )
        assert found.next_step == (
            "Fix the KeyError of rank 1 at server.py:7: it ended the thread 'sender' while the "
            "rank went on."
        )

    @pytest.mark.parametrize(
        "evidence",
        [
            lambda self: self.evidence(),
            lambda self: self.evidence((1, self.ERROR), (0, self.ERROR)),
            lambda self: self.evidence((1, replace(self.ERROR, time=-60.0))),  # long before
            lambda self: self.evidence((1, replace(self.ERROR, time=5.0))),  # a watchdog of theirs
            lambda self: self.evidence((1, self.ERROR), calls=9),  # the job went on
            lambda self: self.evidence((1, replace(self.ERROR, where=""))),  # a library's
        ],
        ids=["none", "both", "long-before", "after", "went-on", "of-a-library"],
    )  # fmt: skip
    def test_a_thread_that_may_have_ended_for_another_reason_names_nobody(
        self, evidence: Callable[[object], Evidence]
    ) -> None:
        assert diagnose(evidence(self)).culprits == ()


class TestWorkers:
    def cause(self, *workers: Worker) -> str:
        evidence = Job(GROUP, [[Op("a")], []]).run()
        stack = Stack("MainThread", "py-spy", (LOADER, Frame("/me/train.py", 88, "epoch")))
        seen = replace(evidence.ranks[1], finished=False, exit=None, stacks=(stack,))
        seen = replace(seen, workers=workers)
        ranks = {**evidence.ranks, 1: seen}
        stall = Stall(1.0, 3.0, (0,), (1,))
        found = diagnose(replace(evidence, ranks=ranks, stall=stall, watched=True))
        assert found.cause.split(" Its ")[0].endswith("Rank 1 waits for data at train.py:88 epoch.")
        return found.cause

    def worker(self, *frames: Frame) -> Worker:
        return Worker(4242, (Stack("MainThread", "py-spy", frames),))

    def test_a_worker_in_the_users_code(self) -> None:
        cause = self.cause(self.worker(Frame("/me/data.py", 33, "read"), LOOP))
        assert cause.endswith("Its worker process 4242 is at data.py:33 read.")

    def test_an_idle_worker(self) -> None:
        """Outside its loop are only the frames that it inherited from the rank."""
        assert "4242" not in self.cause(self.worker(LOOP, Frame("/me/train.py", 88, "epoch")))

    def test_no_worker(self) -> None:
        assert "worker" not in self.cause()
