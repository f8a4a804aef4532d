"""Where ranks are in the user's code, the conditions that part them, and what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from moediag.diagnosis import diagnose
from moediag.diagnosis.blame.standings import Standing
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.diagnosis.words.next_step import next_step
from moediag.diagnosis.words.paths import path_lines
from moediag.evidence.model import (
    Collective,
    Condition,
    Evidence,
    ExitStatus,
    Frame,
    Group,
    RankError,
    Stack,
    Stall,
)
from moediag.result import Diagnosis, Verdict
from tests.unit.evidence_builder import Job, Op, died

TORCH = Frame("/env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", 9, "op")
DATA = Frame("/env/lib/python3.12/site-packages/torch/utils/data/dataloader.py", 9, "get")
UNDER = Condition("train.py", 94, "if rank == 0", "under", True, "", frozenset({1, 2}), 0)
ELSE = replace(UNDER, side="else", keeps_out=frozenset({0}))
AFTER = Condition("train.py", 80, "if rank != 0", "after", True, "return", frozenset({1, 2}), 0)
GROUP: dict[str, tuple[tuple[int, ...], str | None]] = {"a": ((0, 1), "world")}


def branch_of(rank: int) -> Condition:
    """The branch of one rank of two."""
    keeps_out = frozenset({1 - rank})
    return Condition("train.py", 98, f"if rank == {rank}", "under", True, "", keeps_out, rank)


def at(line: int, *outer: int, inner: Frame = TORCH) -> tuple[Frame, ...]:
    """A stack whose user frames are these lines of train.py, innermost first."""
    return (inner, *(Frame("/me/train.py", n, "f") for n in (line, *outer)))


def found(
    evidence: Evidence,
    stacks: Mapping[int, Sequence[Frame]],
    conditions: Mapping[int, Sequence[Condition]] | None = None,
    **changes: object,
) -> Diagnosis:
    """The diagnosis of a watched job with these stacks, and conditions of their innermost lines."""
    known = conditions or {}
    ranks = dict(evidence.ranks)
    for rank, frames in stacks.items():
        own = [frame for frame in frames if frame.file.startswith("/me/")]
        of_line = {own[0].place: tuple(known.get(rank, ()))} if conditions is not None else {}
        calls = ranks[rank].collectives
        if calls:
            calls = (*calls[:-1], replace(calls[-1], site=own[0].place))
        stack = Stack("MainThread", "py-spy", tuple(frames))
        ranks[rank] = replace(
            ranks[rank], collectives=calls, stacks=(stack,), conditions=of_line, **changes
        )
    return diagnose(replace(evidence, ranks=ranks, watched=True))


def mismatch() -> Evidence:
    """Rank 0 waits in all_reduce, rank 1 in barrier."""
    return Job(GROUP, [[Op("a")], [Op("a", "barrier", numel=0)]]).run()


def away() -> Evidence:
    """Rank 0 waits in all_reduce, rank 1 is elsewhere."""
    evidence = Job(GROUP, [[Op("a")], []]).run()
    seen = replace(evidence.ranks[1], finished=False, exit=None)
    stall = Stall(1.0, 3.0, (0,), (1,))
    return replace(evidence, ranks={**evidence.ranks, 1: seen}, stall=stall)


class TestConditionsThatPartRanks:
    def test_a_call_under_a_condition_that_keeps_the_other_rank_out(self) -> None:
        one = found(mismatch(), {0: at(96), 1: at(99)}, {0: [UNDER], 1: []})
        assert (one.culprits, one.victims, str(one.confidence)) == ((0,), (1,), "medium")
        assert "under `if rank == 0` at train.py:94, which singles out rank 0" in one.cause
        assert one.next_step == (
            "Every rank must reach train.py:96 (all_reduce), or none: it is under `if rank == 0` "
            "at train.py:94."
        )
        (place,) = [p for p in one.places if p.ranks == (0,)]
        assert (place.line, place.what) == ("train.py:96 f", "waits in all_reduce")
        assert place.conditions == ("under `if rank == 0` at train.py:94",)

    def test_two_branches_of_one_condition(self) -> None:
        """`if rank == 0` and `if rank == 1` with the branches exchanged do the same."""
        one = found(mismatch(), {0: at(96), 1: at(99)}, {0: [UNDER], 1: [ELSE]})
        assert one.culprits == ()
        assert one.next_step == (
            "`if rank == 0` at train.py:94 sends rank 0 to train.py:96 and rank 1 to train.py:99: "
            "all ranks must make the same calls."
        )

    def test_ranks_that_left_before_the_call(self) -> None:
        one = found(mismatch(), {0: at(96), 1: at(70)}, {0: [AFTER], 1: []})
        assert one.next_step.endswith("it is after `if rank != 0: return` at train.py:80.")

    def test_a_condition_around_both_calls_parts_nobody(self) -> None:
        both = replace(UNDER, keeps_out=frozenset())
        one = found(mismatch(), {0: at(96), 1: at(99)}, {0: [both], 1: [both]})
        assert "train.py:94" not in one.next_step
        assert all(place.conditions == () for place in one.places)

    def test_a_condition_that_keeps_out_no_member_of_the_group(self) -> None:
        outside = replace(UNDER, keeps_out=frozenset({2}))
        one = found(mismatch(), {0: at(96), 1: at(99)}, {0: [outside], 1: []})
        assert "train.py:94" not in one.next_step

    def test_a_condition_whose_names_mean_something_else(self) -> None:
        """Rank 1 is in the body of `if rank == 0`: this rank is not the global one."""
        odd = replace(UNDER, keeps_out=frozenset({1}))
        one = found(mismatch(), {0: at(99), 1: at(96)}, {0: [odd], 1: [odd]})
        assert all(place.conditions == () for place in one.places)

    def test_a_condition_that_names_no_rank_is_not_in_the_next_step(self) -> None:
        plain = Condition("train.py", 90, "if step == 3", "under")
        one = found(mismatch(), {0: at(96), 1: at(99)}, {0: [plain], 1: []})
        assert "step == 3" not in one.next_step
        assert one.places[0].conditions == ("under `if step == 3` at train.py:90",)

    @pytest.mark.parametrize(
        ("first", "asks"),
        [
            (
                "if nan(loss): continue",
                "decide `if nan(loss): continue` at train.py:4 the same way?",
            ),
            ("if args.dry: continue", ""),  # the same on all ranks
            ("log(loss)", ""),
            (None, ""),  # the source is not known
        ],
    )
    def test_a_turn_that_a_rank_may_have_skipped_long_before(
        self, first: str | None, asks: str
    ) -> None:
        source = f"""
def main():
    while state.step < 9:
        {first}
        all_reduce(loss)
        if state.step % 3 == 0:
            barrier()
"""
        evidence = mismatch()
        if first is not None:
            evidence = replace(evidence, sources={"/me/train.py": source})
        loop = Condition("train.py", 3, "while state.step < 9", "loop")
        one = found(evidence, {0: at(5), 1: at(7)}, {0: [loop], 1: [loop]})
        assert one.next_step == (
            "Find out why ranks take different paths: all_reduce at train.py:5 on rank 0, barrier "
            f"at train.py:7 on rank 1.{asks and f' Do all ranks {asks}'}"
        )

    def test_without_source_both_calls_are_told(self) -> None:
        one = found(mismatch(), {0: at(96), 1: at(99)})
        assert one.next_step == (
            "Find out why ranks take different paths: all_reduce at train.py:96 on rank 0, barrier "
            "at train.py:99 on rank 1."
        )

    def test_without_stacks_the_calls_themselves_are_told(self) -> None:
        one = diagnose(replace(mismatch(), watched=True))
        assert one.places == () and "all_reduce on rank 0" in one.next_step

    def test_jobs_that_are_not_a_users_have_no_places(self) -> None:
        one = diagnose(mismatch())
        assert (one.places, one.next_step) == ((), "")

    def test_a_program_that_runs_in_another_thread(self) -> None:
        """As under Ray, whose main thread has frames of Ray alone."""
        ray = Stack("MainThread", "py-spy", (replace(TORCH, file="/env/lib/python3.12/ray.py"),))
        evidence = away()
        # py-spy's JSON and its native text both have the thread; two threads are undecided.
        threads = (["Thread-1"], ["Thread-1", "Thread-1"], ["Thread-1", "Thread-2"])
        for names, line in zip(threads, ("train.py:50 f", "train.py:50 f", ""), strict=True):
            own = [Stack(name, "py-spy", at(50)[1:]) for name in names]
            seen = replace(evidence.ranks[1], stacks=(ray, *own))
            one = diagnose(replace(evidence, ranks={**evidence.ranks, 1: seen}, watched=True))
            (place,) = [p for p in one.places if p.ranks == (1,)] or [None]
            assert (place.line if place is not None else "") == line
            assert ("f (train.py:50)" in one.stacks[1]) == bool(line)

    def test_callers_are_the_users_lines(self) -> None:
        one = found(mismatch(), {0: at(96, 50, 12), 1: at(99, 12)})
        assert [p.callers for p in one.places if p.ranks == (0,)] == [
            ("train.py:50 f", "train.py:12 f")
        ]


class TestBlameByCondition:
    """Two ranks in different calls: only the program's own branch for one of them tells."""

    NOT_ONE = Condition("train.py", 94, "if rank != 1", "under", True, "", frozenset({1}), 1)

    def test_of_two_ranks_none_is_named_that_a_branch_leaves_out(self) -> None:
        """`if rank != 1: all_reduce()` does what `if rank == 0: all_reduce()` does: one text
        singles out rank 1, the other one rank 0."""
        one = found(mismatch(), {0: at(96), 1: at(99)}, {0: [self.NOT_ONE], 1: []})
        assert (one.culprits, one.victims) == ((), ())
        assert one.next_step == (
            "Either the all_reduce of rank 0 at train.py:96 (under `if rank != 1` at train.py:94) "
            "or the barrier of rank 1 at train.py:99 is out of place: all ranks must make the same "
            "calls in one order."
        )

    def test_the_one_rank_that_a_branch_leaves_out(self) -> None:
        extra = Op("a", "barrier", numel=0)
        job = Job({"a": ((0, 1, 2), "world")}, [[Op("a")], [extra], [Op("a")]]).run()
        known = {0: [self.NOT_ONE], 1: [], 2: [self.NOT_ONE]}
        one = found(job, {0: at(96), 1: at(99), 2: at(96)}, known)
        assert one.culprits == (1,)
        assert one.next_step.startswith("Every rank must reach train.py:96 (all_reduce), or none")

    @pytest.mark.parametrize(("keeps_out", "named"), [({0}, ()), (set(), (0,))])
    def test_two_of_three_ranks_in_a_branch_that_is_not_for_the_third(
        self, keeps_out: set[int], named: tuple[int, ...]
    ) -> None:
        """`if rank == 0: broadcast() else: broadcast()`: rank 0 should not be where they are."""
        there = Op("a", "broadcast")
        job = Job({"a": ((0, 1, 2), "world")}, [[Op("a")], [there], [there]]).run()
        others = Condition(
            "train.py", 94, "if rank == 0", "else", True, "", frozenset(keeps_out), None
        )
        stacks = {0: at(61), 1: at(99), 2: at(99)}
        assert found(job, stacks, {0: [], 1: [others], 2: [others]}).culprits == named

    def test_each_rank_has_a_branch_of_its_own(self) -> None:
        one = found(mismatch(), {0: at(96), 1: at(99)}, {0: [UNDER], 1: [branch_of(1)]})
        assert one.culprits == ()
        assert one.next_step.startswith(
            "Either the all_reduce of rank 0 at train.py:96 (under `if rank == 0` at train.py:94) "
            "or the barrier of rank 1 at train.py:99 (under `if rank == 1` at train.py:98) is out "
        )

    @pytest.mark.parametrize("known", [None, {0: [], 1: []}])
    def test_without_source_or_condition_nobody_is_named(
        self, known: Mapping[int, Sequence[Condition]] | None
    ) -> None:
        assert found(mismatch(), {0: at(96), 1: at(99)}, known).culprits == ()

    def test_a_condition_for_no_single_rank_names_nobody(self) -> None:
        half = replace(UNDER, text="if rank < 1", singles=None)
        assert found(mismatch(), {0: at(96), 1: at(99)}, {0: [half], 1: []}).culprits == ()

    def test_a_stack_of_another_call_proves_nothing(self) -> None:
        """Rank 0 is at a line that did not make the call that differs."""
        evidence = mismatch()
        calls = evidence.ranks[0].collectives
        later = replace(calls[-1], index=9, position=1, op="broadcast")
        ranks = {**evidence.ranks, 0: replace(evidence.ranks[0], collectives=(*calls, later))}
        one = found(replace(evidence, ranks=ranks), {0: at(96), 1: at(99)}, {0: [UNDER], 1: []})
        assert one.culprits == ()

    def test_a_call_that_met_another_one_before(self) -> None:
        """Rank 0's call is in its branch in every step; rank 1 has one that meets it."""
        usual = [Op("a"), Op("a")]
        job = Job(GROUP, [[*usual, Op("a")], [*usual, Op("a", "barrier", numel=0)]]).run()
        seen = job.ranks[0]
        calls = tuple(replace(call, site="train.py:96 f") for call in seen.collectives)
        ranks = {**job.ranks, 0: replace(seen, collectives=calls)}
        known = {0: [UNDER], 1: []}
        one = found(replace(job, ranks=ranks), {0: at(96), 1: at(99)}, known)
        assert one.culprits != (0,)
        assert "under `if rank == 0`" in one.next_step

    def test_a_call_of_one_rank_after_the_others_ended(self) -> None:
        evidence = Job(GROUP, [[Op("a")], []]).run()
        one = found(evidence, {0: at(96)}, {0: [UNDER]})
        assert (one.culprits, one.victims) == ((0,), (1,))


class TestHandlers:
    """A call inside ``except``: an exception was caught there, on one rank alone."""

    HANDLER = Condition("train.py", 95, "except ValueError", "handler")

    def test_the_rank_that_caught_an_exception(self) -> None:
        one = found(mismatch(), {0: at(96), 1: at(99)}, {0: [self.HANDLER], 1: []})
        assert one.culprits == (0,)
        assert "in the handler `except ValueError` at train.py:95, where rank 0 caught" in one.cause
        assert one.next_step == (
            "Fix the exception of rank 0, or make the call at train.py:96 on all ranks: it is in "
            "the handler `except ValueError` at train.py:95."
        )

    def test_the_exception_that_it_still_handles(self) -> None:
        error = RankError("ValueError", "corrupt", "train.py:7 load")
        evidence = mismatch()
        ranks = {**evidence.ranks, 0: replace(evidence.ranks[0], handling=error)}
        known = {0: [self.HANDLER], 1: []}
        one = found(replace(evidence, ranks=ranks), {0: at(96), 1: at(99)}, known)
        assert one.next_step.startswith("Fix the ValueError of rank 0 at train.py:7, or make")

    def test_both_ranks_are_in_it(self) -> None:
        both = {0: [self.HANDLER], 1: [self.HANDLER]}
        one = found(mismatch(), {0: at(96), 1: at(99)}, both)
        assert one.culprits == () and "exception" not in one.next_step

    @pytest.mark.parametrize(("text", "named"), [("bad row", (0,)), ("socket timeout", ())])
    def test_a_handler_of_an_error_of_communication_names_nobody(
        self, text: str, named: tuple[int, ...]
    ) -> None:
        """Another rank sent nothing, or too late."""
        error = RankError("RuntimeError", text, "train.py:93 f")
        one = found(mismatch(), {0: at(96), 1: at(99)}, {0: [self.HANDLER], 1: []}, handling=error)
        assert one.culprits == named

    @pytest.mark.parametrize(("op", "named"), [("send", ()), ("all_reduce", (0,))])
    def test_a_send_is_rightly_under_a_condition(self, op: str, named: tuple[int, ...]) -> None:
        peers = (1, 0) if op == "send" else (None, None)
        ops = ("send", "recv") if op == "send" else (op, op)
        made = [[Op("a", o, numel=n, peer=p)] for o, n, p in zip(ops, (8, 4), peers, strict=True)]
        one = found(Job(GROUP, made).run(), {0: at(96), 1: at(99)}, {0: [UNDER], 1: []})
        assert one.cause.startswith("Sizes differ")
        assert one.culprits == named

    def test_a_handler_and_another_ranks_branch_name_nobody(self) -> None:
        one = found(mismatch(), {0: at(96), 1: at(99)}, {0: [self.HANDLER], 1: [branch_of(1)]})
        assert one.culprits == ()


class TestCallsOfRanksThatAreGone:
    """A mismatch on gloo ends the ranks at once: only the recorded lines of the calls are left."""

    def ended(self, conditions: Sequence[Condition], files: frozenset[str]) -> Diagnosis:
        job = mismatch()
        ranks = {}
        for rank, seen in job.ranks.items():
            call = replace(
                seen.collectives[0],
                site="operations.py:355 gather",
                callers=(f"train.py:{96 + rank} f", "train.py:12 main"),
            )
            error = RankError("RuntimeError", "Connection reset by peer (gloo)")
            ranks[rank] = replace(
                seen, collectives=(call,), error=error, exit=ExitStatus(code=1), user_files=files,
                conditions={"train.py:96 f": tuple(conditions), "train.py:97 f": ()},
            )  # fmt: skip
        return diagnose(replace(job, ranks=ranks, stall=None, watched=True))

    def test_the_users_line_and_its_condition(self) -> None:
        one = self.ended([UNDER], frozenset({"train.py"}))
        assert (str(one.verdict), one.culprits) == ("collective-mismatch", (0,))
        assert [(p.line, p.what, p.callers) for p in one.places] == [
            ("train.py:96 f", "called all_reduce", ("train.py:12 main",)),
            ("train.py:97 f", "called barrier", ("train.py:12 main",)),
        ]
        assert "Every rank must reach train.py:96 (all_reduce), or none" in one.next_step

    def test_without_a_condition(self) -> None:
        one = self.ended([], frozenset({"train.py"}))
        assert one.culprits == ()
        assert "all_reduce at train.py:96 on rank 0" in one.next_step


class TestRanksElsewhere:
    def test_a_rank_without_data(self) -> None:
        one = found(away(), {0: at(96), 1: at(50, inner=DATA)})
        assert one.next_step == "Find out why rank 1 gets no batch at train.py:50."
        assert one.places[0].ranks == (1,) and one.places[0].what == "waits for data"

    def test_a_stopped_rank(self) -> None:
        one = found(away(), {1: at(50)}, os_state="T")
        assert one.next_step == "Find out what stopped rank 1; SIGCONT continues it."

    def test_a_rank_that_computes(self) -> None:
        one = found(away(), {1: at(50)}, os_state="R")
        assert one.next_step == (
            "Find out why rank 1 computes at train.py:50 and never continues; if it just takes "
            "long, raise --patience."
        )

    def test_a_condition_that_keeps_it_from_the_call_comes_first(self) -> None:
        one = found(away(), {0: at(96), 1: at(50, inner=DATA)}, {0: [UNDER], 1: []})
        assert one.culprits == (1,)  # who is elsewhere
        assert "it is under `if rank == 0`" in one.next_step

    def test_a_rank_that_ended(self) -> None:
        evidence = Job(GROUP, [[Op("a")], []]).run()
        one = found(evidence, {0: at(96)})
        assert one.next_step == (
            "Make the call at train.py:96 on all ranks or on none: rank 1 ends without it. Do all "
            "ranks run the same number of steps?"
        )
        assert [p.what for p in one.places if p.ranks == (1,)] == ["finished"]

    def test_the_loops_that_a_rank_left_earlier(self) -> None:
        evidence = Job(GROUP, [[Op("a")], []]).run()
        forever, epochs, batches = (
            Condition("train.py", line, text, "loop")
            for line, text in (
                (70, "while True"), (80, "for e in range(n)"), (90, "for x in loader")
            )
        )  # fmt: skip
        one = found(evidence, {0: at(96)}, {0: [forever, epochs, batches], 1: []})
        assert one.next_step.endswith(
            "rank 1 ends without it. Do all ranks run the loops `for e in range(n)` at train.py:80 "
            "and `for x in loader` at train.py:90 the same number of times?"
        )
        assert all(not place.conditions for place in one.places)

    @pytest.mark.parametrize(
        ("turns", "test", "asks"),
        [
            ("range(4)", "kl > 0.1", "decide `if kl > 0.1` at train.py:5 the same way?"),
            ("range(4)", "args.once", "run the same number of steps?"),
            (
                "loader",
                "kl > 0.1",
                "run the loop `for x in loader` at train.py:3 the same number of times?",
            ),
        ],
    )
    def test_a_loop_of_equal_turns_that_a_rank_may_leave(
        self, turns: str, test: str, asks: str
    ) -> None:
        source = f"""
def main():
    for x in {turns}:
        all_reduce(x)
        if {test}:
            break
"""
        evidence = Job(GROUP, [[Op("a")], []]).run()
        evidence = replace(evidence, sources={"/me/train.py": source})
        loop = Condition("train.py", 3, f"for x in {turns}", "loop")
        one = found(evidence, {0: at(4)}, {0: [loop], 1: []})
        assert one.next_step.endswith(f"Do all ranks {asks}")


class TestValuesThatDiffer:
    def test_sizes_are_those_of_the_inputs(self) -> None:
        evidence = Job(GROUP, [[Op("a", "all_gather", 1104)], [Op("a", "all_gather", 1094)]]).run()
        one = found(evidence, {0: at(96), 1: at(96)}, {0: [], 1: []})
        assert "552 elements at train.py:96 on rank 0, 547 elements" in one.next_step
        assert "1,104" not in one.next_step
        assert (
            "all_gather needs inputs of equal size on all ranks, but rank 0 passes 552, rank 1 "
            "passes 547 elements." in one.cause
        )

    @pytest.mark.parametrize(
        ("before", "loops", "says"),
        [
            ((32, 4), True, "run `for p in every` at train.py:95 over the same elements in one"),
            ((32, 4), False, "Let all ranks make the calls in one order: 32 elements at train.py"),
            ((32,), True, "Pass all_reduce tensors of equal size on all ranks: 32 elements at"),
        ],
    )
    def test_sizes_that_are_all_usual_in_a_line_are_out_of_order(
        self, before: tuple[int, ...], loops: bool, says: str
    ) -> None:
        loop = [Condition("train.py", 95, "for p in every", "loop")] * loops
        usual = [Op("a", numel=size) for size in before]
        evidence = Job(GROUP, [[*usual, Op("a", numel=32)], [*usual, Op("a", numel=4)]]).run()
        for rank, seen in evidence.ranks.items():
            calls = tuple(replace(call, site="train.py:96 f") for call in seen.collectives)
            object.__setattr__(evidence.ranks[rank], "collectives", calls)
        one = found(evidence, {0: at(96, 99), 1: at(96, 99)}, {0: loop, 1: loop})
        assert says in one.next_step

    def test_gathers_of_equal_inputs_have_no_such_sentence(self) -> None:
        evidence = Job(GROUP, [[Op("a", "all_gather", 8)], [Op("a", "barrier", 0)]]).run()
        assert "inputs of equal size" not in found(evidence, {0: at(96), 1: at(99)}).cause

    @pytest.mark.parametrize(
        ("field", "one", "other", "says"),
        [
            ("dtype", "float32", "bfloat16", "Use one dtype in all_reduce on all ranks: float32"),
            ("reduce", "sum", "max", "Use one reduction in all_reduce on all ranks: sum"),
        ],
    )
    def test_other_values(self, field: str, one: str, other: str, says: str) -> None:
        ops = [replace(Op("a"), **{field: value}) for value in (one, other)]
        evidence = Job(GROUP, [[ops[0]], [ops[1]]]).run()
        assert found(evidence, {0: at(96), 1: at(96)}).next_step.startswith(says)


class TestCrashes:
    def test_an_exception(self) -> None:
        evidence = Job(GROUP, [[Op("a")], [Op("a")]]).run()
        error = RankError("ValueError", "empty", "train.py:7 load")
        one = diagnose(replace(died(evidence, 1, error), watched=True))
        assert one.next_step == "Fix the ValueError of rank 1 at train.py:7."
        assert [(p.ranks, p.line, p.what) for p in one.places] == [
            ((1,), "train.py:7 load", "raised ValueError")
        ]

    def test_a_signal(self) -> None:
        evidence = Job(GROUP, [[Op("a")], [Op("a")]]).run()
        one = diagnose(replace(died(evidence, 1, signal="SIGKILL"), watched=True))
        assert one.next_step.startswith("Find out what killed rank 1")


def test_a_healthy_job_has_no_next_step() -> None:
    evidence = Job(GROUP, [[Op("a")], [Op("a")]]).run()
    ended = {r: replace(s, exit=ExitStatus(code=0)) for r, s in evidence.ranks.items()}
    one = diagnose(replace(evidence, ranks=ended, watched=True))
    assert (str(one.verdict), one.next_step) == ("clean", "")


@pytest.mark.parametrize(
    ("callers", "apart", "told"),
    [
        (("sync.py:1 all", "train.py:2 main"), (), True),
        (("sync.py:1 all",), (), False),  # nothing is known of who called it
        (("sync.py:1 all", "train.py:2 main"), (UNDER,), False),  # the guard says more
        (("sync.py:1 all", "train.py:2 main"), (replace(UNDER, side="decorator"),), True),
        (("sync.py:1 all", "train.py:2 main"), (replace(UNDER, file="sync.py"),), True),
    ],
)
def test_a_line_of_a_helper_is_shown_with_the_one_that_called_it(
    callers: tuple[str, ...], apart: tuple[Condition, ...], told: bool
) -> None:
    sources = {"/me/sync.py": "reduce(x)\n", "/me/train.py": "x = 1\nsync.all(x)\n"}
    stands = Standing((1,), "sync.py:1 reduce", "waits", None, callers, None, apart=apart)
    lines = path_lines(None, [stands], Evidence(2, {}, sources=sources))
    assert any(one.text == "sync.all(x)" for one in lines) is told
    assert any(one.text == "reduce(x)" for one in lines)


@pytest.mark.parametrize(
    ("function", "file"), [("send", "client/sync.py"), ("other", None), ("", None)]
)
def test_files_of_one_name_are_told_apart_by_the_functions_in_them(
    function: str, file: str | None
) -> None:
    """Not if both have the function in that line, or none."""
    sources = {
        "/me/client/sync.py": "def send():\n    give(x)\n",
        "/me/server/sync.py": "def receive():\n    take(x)\n",
    }
    stands = Standing((1,), f"sync.py:2 {function}".rstrip(), "waits", None, (), None)
    lines = path_lines(None, [stands], Evidence(2, {}, sources=sources))
    assert [(one.file, one.text) for one in lines] == ([(file, "give(x)")] if file else [])
    sources["/me/server/sync.py"] = sources["/me/client/sync.py"]
    assert path_lines(None, [stands], Evidence(2, {}, sources=sources)) == ()


def test_a_line_that_two_sides_share_is_shown_with_both_that_called_it() -> None:
    sources = {"/me/train.py": "y = model(x)\nscore = test(x)\nstep(x)\n"}
    sides = [
        Standing((rank,), "train.py:1 f", "called all_to_all", None, (caller, "train.py:9 main"),
                 None)
        for rank, caller in enumerate(("train.py:3 train", "train.py:2 test"))
    ]  # fmt: skip
    lines = path_lines(None, sides, Evidence(2, {}, sources=sources))
    told = {one.text: one.acts for one in lines}
    assert told["step(x)"] == (((0,), "came from here"),)
    assert told["score = test(x)"] == (((1,), "came from here"),)
    alike = [replace(one, line=f"sync.py:{one.ranks[0]} f", callers=sides[0].callers)
             for one in sides]  # fmt: skip
    shown = path_lines(None, alike, Evidence(2, {}, sources=sources))
    assert "step(x)" not in {one.text for one in shown}  # all came from there


@pytest.mark.parametrize(
    ("callers", "line"),
    [
        (("train.py:7 step", "train.py:9 main"), "train.py:7"),
        (("other.py:7 step",), "moe.py:104"),  # of no file of the program
        ((), "moe.py:104"),
    ],
)
def test_a_call_of_a_library_is_told_by_the_line_of_the_program(
    callers: tuple[str, ...], line: str
) -> None:
    calls = {
        rank: Collective(0, "0", 0, "all_to_all", size, size, "float32", site="moe.py:104 forward",
                         callers=callers)
        for rank, size in ((0, 8), (1, 16))
    }  # fmt: skip
    found = Divergence("splits", Group("0", (0, 1)), 0, calls, pairs=((0, 1),))
    evidence = Evidence(2, {}, watched=True, sources={"/me/train.py": "\n"})
    told = next_step(evidence, Verdict.COLLECTIVE_MISMATCH, found, None, (), ())
    assert told == f"Make what each rank sends match what the other expects, at {line}."
