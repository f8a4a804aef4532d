"""Diagnosis of watched jobs: program lines, and deviations from earlier steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.model import Evidence, ExitStatus, Frame, RankError, Stack, Stall
from tests.unit.evidence_builder import Job, Op

LIBRARY = Frame("/env/lib/python3.11/site-packages/deepspeed/runtime/zero.py", 7, "reduce")
PROGRAM = Frame("/home/me/train.py", 33, "train")


def circle(steps: int) -> Evidence:
    """Rank 0 enters one group too early in the last of ``steps``."""
    usual = [Op("a", numel=64), Op("a", numel=2), Op("b"), Op("a", "all_gather")]
    groups: dict[str, tuple[tuple[int, ...], str | None]] = {
        "a": ((0, 1), "dp"),
        "b": ((0, 1), "ep"),
    }
    good = [replace(op, step=step) for step in range(1, steps + 1) for op in usual]
    early = [*good[:-3], good[-2], good[-3], good[-1]]
    return replace(Job(groups, [early, good]).run(), watched=True)


class TestCircularWait:
    def test_the_rank_that_breaks_the_rhythm_is_the_culprit(self) -> None:
        found = diagnose(circle(5))
        assert "in a circle" in found.cause
        assert (found.culprits, found.victims) == ((0,), (1,))
        assert found.confidence == "low"
        assert "always came once before" in found.cause
        assert "rank 0 made it once more" in found.cause

    def test_the_first_step_has_no_culprit(self) -> None:
        found = diagnose(circle(1))
        assert "in a circle" in found.cause
        assert (found.culprits, found.victims) == ((), ())
        assert "The evidence does not show whose order is wrong" in found.cause


def waiting(*frames: Frame, site: str, watched: bool = True) -> str:
    """The cause, where rank 0 waits in a call of ``site`` and rank 1 never comes."""
    evidence = Job({"a": ((0, 1), None)}, [[Op("a")], []]).run()
    seen = evidence.ranks[0]
    calls = tuple(replace(call, site=site) for call in seen.collectives)
    stack = Stack("MainThread", "py-spy", frames)
    ranks = {**evidence.ranks, 0: replace(seen, collectives=calls, stacks=(stack,))}
    return diagnose(replace(evidence, ranks=ranks, watched=watched)).cause


class TestInterruption:
    """SIGTERM from a scheduler, before a wait is long enough to be called a hang."""

    def waits(self, **more: object) -> Evidence:
        evidence = Job({"a": ((0, 1), None)}, [[Op("a")], []]).run()
        stack = Stack("MainThread", "py-spy", (PROGRAM,))
        ranks = {**evidence.ranks, 1: replace(evidence.ranks[1], stacks=(stack,), os_state="R")}
        stall = Stall(4.0, 12.0, (0,), (1,))
        made = replace(evidence, ranks=ranks, watched=True, interrupted=True, stall=stall)
        return replace(made, **more)  # type: ignore[arg-type]

    def test_the_present_wait_is_described_and_nobody_is_named(self) -> None:
        found = diagnose(self.waits())
        assert (found.verdict, found.culprits, found.victims) == ("inconclusive", (), ())
        assert "no rank had made progress for 12 s" in found.cause
        assert "Rank 0 waits in all_reduce" in found.cause
        assert "Rank 1 computes at train.py:33 train." in found.cause

    def test_without_a_wait_only_the_interruption_is_known(self) -> None:
        found = diagnose(self.waits(stall=None))
        assert found.cause == "The run was interrupted before it ended."

    def test_a_rank_that_a_signal_stopped_is_told(self) -> None:
        evidence = self.waits(stall=None)
        stopped = replace(evidence.ranks[1], os_state="T")
        found = diagnose(replace(evidence, ranks={**evidence.ranks, 1: stopped}))
        assert found.cause.endswith("Rank 1 is stopped by a signal (SIGSTOP) at train.py:33 train.")
        assert found.culprits == ()

    def test_an_exception_before_the_interruption_decides(self) -> None:
        evidence = self.waits(stall=None)
        error = RankError("ValueError", "the batch is empty", "train.py:9 load")
        failed = replace(evidence.ranks[1], error=error, exit=ExitStatus(code=1))
        evidence = replace(evidence, ranks={**evidence.ranks, 1: failed})
        found = diagnose(replace(evidence, deaths=(1,)))
        assert (found.verdict, found.culprits) == ("crash", (1,))
        # What the ranks raised while they were ended is not why.
        assert diagnose(evidence).verdict == "inconclusive"


class TestProgramLine:
    def test_a_call_made_by_a_library_has_the_program_line(self) -> None:
        cause = waiting(LIBRARY, PROGRAM, site="zero.py:7 reduce")
        assert "at zero.py:7 reduce" in cause
        assert "Rank 0 got there from train.py:33 train." in cause

    def test_a_call_made_by_the_program_has_no_second_line(self) -> None:
        cause = waiting(PROGRAM, site="train.py:33 train")
        assert "at train.py:33 train" in cause and "got there from" not in cause

    @pytest.mark.parametrize("frames", [(), (LIBRARY,)])
    def test_a_missing_stack_has_no_program_line(self, frames: tuple[Frame, ...]) -> None:
        assert "got there from" not in waiting(*frames, site="zero.py:7 reduce")

    def test_a_trial_has_no_program_line(self) -> None:
        cause = waiting(LIBRARY, PROGRAM, site="zero.py:7 reduce", watched=False)
        assert "got there from" not in cause


class TestGaveUp:
    """Ranks failed because they waited for another one for as long as their program allows."""

    TIMEOUT = RankError("RuntimeError", "[gloo/x.cc:81] Timed out waiting 10000ms for recv")
    RESET = RankError("RuntimeError", "[gloo/x.cc:553] Connection closed by peer")

    def ended(self, error: RankError, *frames: Frame) -> Evidence:
        """Ranks 0 and 2 failed in a second call with ``error``, when rank 1 was at ``frames``."""
        made = [[Op("a"), Op("a")], [Op("a")], [Op("a"), Op("a")]]
        evidence = Job({"a": ((0, 1, 2), None)}, made).run()
        stacks = (Stack("MainThread", "py-spy", frames),) if frames else ()
        ranks = dict(evidence.ranks)
        for rank in (0, 2):
            failed = ExitStatus(code=1)
            ranks[rank] = replace(ranks[rank], exit=failed, error=error, finished=False)
        killed = ExitStatus(signal="SIGTERM", by_us=True)
        ranks[1] = replace(ranks[1], exit=killed, stacks=stacks, finished=False)
        return replace(evidence, ranks=ranks, stall=None, watched=True)

    @pytest.mark.parametrize("late", [(1,), (1, 2)])
    def test_more_ranks_that_come_late_than_gave_up_are_not_named(
        self, late: tuple[int, ...]
    ) -> None:
        evidence = Job({"a": ((0, 1, 2), None)}, [[Op("a")]] * 3).run()
        ranks = {}
        for rank, seen in evidence.ranks.items():
            time, error = (12.0, self.RESET) if rank in late else (1.0, self.TIMEOUT)
            call = replace(seen.collectives[0], time=time, completed=False)
            ranks[rank] = replace(
                seen, collectives=(call,), exit=ExitStatus(code=1), finished=False,
                error=replace(error, time=11.0 if rank not in late else 13.0),
            )  # fmt: skip
        found = diagnose(replace(evidence, ranks=ranks, stall=None, watched=True))
        assert (found.verdict, found.culprits) == ("crash", late if len(late) == 1 else ())

    def test_the_rank_that_did_something_else_is_named(self) -> None:
        found = diagnose(self.ended(self.TIMEOUT, PROGRAM))
        assert (found.verdict, found.culprits, found.victims) == ("crash", (1,), (0, 2))
        assert "train.py:33" in found.cause and "gave up" in found.cause
        assert "raise the timeout" in found.next_step

    def test_the_rank_that_came_after_they_gave_up_is_named(self) -> None:
        """It then lost the connection to them. In a call of another group it may have waited."""
        groups: dict[str, tuple[tuple[int, ...], str | None]] = {
            "a": ((0, 1, 2), None), "b": ((1, 2), None),
        }  # fmt: skip
        for between, named in (([], (1,)), ([Op("b")], ())):
            made = [[Op("a"), Op("a")], [Op("a"), *between, Op("a")], [Op("a"), *between, Op("a")]]
            evidence = Job(groups, made).whole()
            ranks = dict(evidence.ranks)
            for rank, error in ((0, self.TIMEOUT), (2, self.TIMEOUT), (1, self.RESET)):
                *done, last = ranks[rank].collectives
                last = replace(last, time=130.0 if rank == 1 else 100.0, completed=False)
                ranks[rank] = replace(
                    ranks[rank], exit=ExitStatus(code=1), error=replace(error, time=last.time + 10),
                    collectives=(*done, last), finished=False,
                )  # fmt: skip
            found = diagnose(replace(evidence, ranks=ranks, stall=None, watched=True))
            assert (found.verdict, found.culprits) == ("crash", named), found.cause

    def test_a_rank_that_also_communicates_or_is_not_seen_is_not(self) -> None:
        waits = Frame("/env/torch/distributed/distributed_c10d.py", 9, "all_reduce")
        for frames in ((waits, PROGRAM), ()):
            assert not diagnose(self.ended(self.TIMEOUT, *frames)).culprits
        assert not diagnose(self.ended(self.RESET, PROGRAM)).culprits


def test_a_send_to_a_rank_that_finished_is_the_divergence() -> None:
    """Also if it is asynchronous, and not the last call of the rank that failed."""
    groups: dict[str, tuple[tuple[int, ...], str | None]] = {"pp": ((0, 1), "pp")}
    sends = [Op("pp", "send", 8, peer=1), Op("pp", "send", 8, peer=1), Op("pp", "recv", 8, peer=1)]
    evidence = Job(groups, [sends, [Op("pp", "recv", 8, peer=0)]]).whole()
    for error, verdict in ((TestGaveUp.RESET, "collective-mismatch"), (None, "clean")):
        ranks = dict(evidence.ranks)
        calls = tuple(
            replace(c, asynchronous=True, completed=at == 0)
            for at, c in enumerate(ranks[0].collectives)
        )
        code = ExitStatus(code=0 if error is None else 1)
        ranks[0] = replace(
            ranks[0], collectives=calls, exit=code, error=error, finished=error is None
        )
        ranks[1] = replace(ranks[1], exit=ExitStatus(code=0), finished=True)
        found = diagnose(replace(evidence, ranks=ranks, stall=None, watched=True))
        assert found.verdict == verdict, found.cause
        assert ("reached the end" in found.cause) == (error is not None)
