"""Different decisions of ranks: compared if two ranks recorded them, and named in the cause."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moediag.diagnosis import diagnose
from moediag.diagnosis.blame import decisions
from moediag.diagnosis.schedules.align import align
from moediag.diagnosis.schedules.surplus import ahead
from moediag.evidence.model import Decision, Evidence
from moediag.evidence.trial_folder import read_trial
from moediag.recorder import decision as tell
from moediag.result import Verdict
from tests.unit.evidence_builder import Job, Op, fsdp2_job, measured, write

SKIPPED, TOOK = "skipped optimizer.step() (norm inf)", "took optimizer.step()"


def deciding(evidence: Evidence, *of_ranks: list[Decision]) -> Evidence:
    ranks = dict(evidence.ranks)
    for rank, told in enumerate(of_ranks):
        ranks[rank] = replace(ranks[rank], decisions=tuple(told))
    return replace(evidence, ranks=ranks)


def step(value: float | str | tuple[str, ...], number: int = 1, time: float = 0.1) -> Decision:
    return Decision("optimizer step", value, number, time)


def parting(world: int = 2) -> Evidence:
    """The last rank skips the three calls of the optimizer and goes on to the next forward."""
    start = [Op("0", "all_gather", 64)]
    steps = [Op("0", "all_reduce", 8)] * 3
    programs = [[*start, *steps, *start] for _ in range(world - 1)] + [[*start, *start]]
    groups: dict[str, tuple[tuple[int, ...], str | None]] = {"0": (tuple(range(world)), "dp_shard")}
    return Job(groups, programs).run()


class TestDifferences:
    def test_equal_decisions_are_not_reported(self) -> None:
        evidence = deciding(parting(), [step(TOOK)], [step(TOOK)])
        assert decisions.parted(evidence) == ()
        assert decisions.table(()) is None

    def test_a_rank_without_decisions_is_not_compared(self) -> None:
        assert decisions.parted(deciding(parting(), [step(TOOK)], [])) == ()
        two = deciding(parting(), [step(TOOK), step(TOOK, 2)], [step(TOOK)])
        assert decisions.parted(two) == ()

    def test_repeated_decisions_in_one_step_are_compared_in_order(self) -> None:
        evidence = deciding(parting(), [step(TOOK), step(TOOK)], [step(TOOK), step(SKIPPED)])
        (found,) = decisions.parted(evidence)
        assert found == decisions.Parted("optimizer step", 1, {0: TOOK, 1: SKIPPED})

    def test_the_table_has_a_row_for_each_branch(self) -> None:
        every = [decisions.Parted("micro-batches", s, {0: 3.0, 1: 2.0, 2: 3.0}) for s in (1, 2, 3)]
        table = decisions.table(every)
        assert table is not None
        assert table.rows == (
            ("1 to 3", "micro-batches", "3", "ranks 0, 2"),
            ("1 to 3", "micro-batches", "2", "rank 1"),
        )


class TestSentence:
    @pytest.mark.parametrize(("what", "values", "said"), [
        ("optimizer step", {0: TOOK, 1: SKIPPED, 2: TOOK}, f"rank 1 {SKIPPED}, ranks 0, 2 {TOOK}"),
        ("micro-batches", {0: 3.0, 1: 2.0},
         "rank 1 has 2 micro-batches, rank 0 has 3 micro-batches"),
        ("metric", {0: ("loss", "kl"), 1: ("loss",)}, "rank 1 has no metric `kl`"),
        ("metric", {0: ("loss", "kl"), 1: ("loss",), 2: ("kl",)},
         "rank 1 has no metric `kl`, rank 2 has no metric `loss`"),
        ("metric", {0: ("loss", "kl"), 1: ("kl", "loss")},
         "the metrics came in another order: loss, kl on rank 0; kl, loss on rank 1"),
        ("metric", {0: ("loss",), 1: ()}, "rank 1 has no metric `loss`"),
    ])  # fmt: skip
    def test_sentence_describes_the_decisions(
        self, what: str, values: dict[int, object], said: str
    ) -> None:
        one = decisions.Parted(what, 2, values)  # type: ignore[arg-type]
        assert decisions.sentence([one], True, None) == f"Before it, {said}."
        assert decisions.sentence([one], False, 2) == f"In that step, {said}."
        assert decisions.sentence([one], False, 3) == f"In step 2, {said}."

    def test_sentence_is_empty_without_decisions(self) -> None:
        assert decisions.sentence((), True, None) == ""


class TestDiagnosis:
    def test_cause_mentions_a_step_skipped_before_the_divergence(self) -> None:
        evidence = deciding(parting(), [step(TOOK)], [step(SKIPPED)])
        found = diagnose(evidence)
        assert found.verdict == Verdict.HANG
        assert found.cause.endswith(f"Before it, rank 1 {SKIPPED}, rank 0 {TOOK}.")
        assert "optimizer step" in found.signature.split(":")
        assert [t.title for t in found.tables] == [decisions.TABLE]

    def test_equal_decisions_do_not_change_the_cause(self) -> None:
        plain, told = diagnose(parting()), deciding(parting(), [step(TOOK)], [step(TOOK)])
        assert diagnose(told) == plain
        assert "Before it" not in plain.cause
        assert "optimizer step" not in plain.signature

    def test_later_decisions_do_not_explain_the_divergence(self) -> None:
        late = step(SKIPPED, time=99.0)
        found = diagnose(deciding(parting(), [step(TOOK)], [late]))
        assert "Before it" not in found.cause

    def test_the_latest_step_with_decisions_is_used(self) -> None:
        told = [step(TOOK, 1), step(TOOK, 2)], [step(SKIPPED, 1), step(SKIPPED, 2)]
        evidence = deciding(parting(), *told)
        every = decisions.parted(evidence)
        assert [p.step for p in decisions.before(every, evidence, None, None)] == [2]
        assert [p.step for p in decisions.before(every, evidence, None, 1)] == [1]
        assert decisions.before(every, evidence, None, 0) == ()

    def test_decisions_of_a_clean_run_appear_only_in_the_table(self) -> None:
        evidence = deciding(measured(fsdp2_job(set(), set()).run()), [step(3.0)], [step(2.0)])
        found = diagnose(evidence)
        assert found.verdict == Verdict.CLEAN
        assert "micro" not in found.cause and "Before it" not in found.cause
        assert [t.title for t in found.tables] == [decisions.TABLE]


def test_decisions_are_read_back_from_the_log(tmp_path: Path) -> None:
    told = [step(("loss", "kl")), step(2.0, 2), step(SKIPPED, 3)]
    read = read_trial(write(deciding(parting(), told, []), tmp_path))
    assert read.ranks[0].decisions == tuple(told)
    assert read.ranks[1].decisions == ()


def test_tell_writes_nothing_without_a_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tell("micro-batches", 3)
    assert not [*tmp_path.iterdir()]


class TestRankAhead:
    def evidence(self, steps_of_1: list[int], said: bool = True) -> Evidence:
        """Five all-gathers on both ranks; rank 0's belong to steps 1 1 1 2 2."""
        programs = [
            [Op("0", "all_gather", 64, step=number) for number in numbers]
            for numbers in ([1, 1, 1, 2, 2], steps_of_1)
        ]
        made = Job({"0": ((0, 1), "dp_shard")}, programs).run()
        phase = "step 2" if said else ""
        ranks = {r: replace(seen, last_phase=phase) for r, seen in made.ranks.items()}
        return replace(made, ranks=ranks)

    def test_equal_operations_of_different_steps_are_found(self) -> None:
        evidence = self.evidence([1, 1, 2, 2])
        found = ahead(align(evidence), evidence)
        assert found is not None
        assert (found.position, found.steps) == (2, {0: 1, 1: 2})
        assert "From operation 2 on dp_shard rank 1 was ahead, in step 2 while rank 0 was in" in (
            diagnose(evidence).cause
        )

    def test_equal_steps_are_not_reported(self) -> None:
        evidence = self.evidence([1, 1, 1, 2])
        assert ahead(align(evidence), evidence) is None
        assert "ahead" not in diagnose(evidence).cause

    def test_steps_counted_by_the_recorder_are_ignored(self) -> None:
        evidence = self.evidence([1, 1, 2, 2], said=False)
        assert ahead(align(evidence), evidence) is None

    def test_different_operations_are_not_compared_by_step(self) -> None:
        evidence = self.evidence([1, 1, 2, 2])
        calls = list(evidence.ranks[1].collectives)
        calls[1] = replace(calls[1], op="reduce_scatter")
        other = replace(evidence.ranks[1], collectives=tuple(calls))
        evidence = replace(evidence, ranks={**evidence.ranks, 1: other})
        assert ahead(align(evidence), evidence) is None
