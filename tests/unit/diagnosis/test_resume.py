"""Resume parity: drift is distinguished from a healthy resume and from nondeterminism."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.model import Evidence
from moediag.protocol import ExpertRows, Outcome, ResumeOutcome, StateDifference, StepNumbers
from moediag.result import Confidence, Diagnosis, Verdict
from tests.unit.evidence_builder import fsdp2_job

LOSSES, NORMS = [4.9, 4.8, 4.7, 4.6], [1.0, 0.9, 0.8, 0.7]
STEPS = StepNumbers(LOSSES, NORMS)
NAMES = [f"model.layers.{n}.mlp.experts.{p}_proj" for n in (0, 1) for p in ("gate_up", "down")]
SHARD = "Shard(0) on ep[2]"


def healthy(rank: int, placement: str = SHARD) -> ResumeOutcome:
    """Four steps against two and two on one of two ranks; everything is restored."""
    own = list(range(4 * rank, 4 * rank + 4))
    return ResumeOutcome(
        through="dcp",
        after=2,
        straight=STEPS,
        again=STEPS,
        resumed=StepNumbers(LOSSES[2:], NORMS[2:]),
        control=StateDifference(compared=100),
        at_load=StateDifference(compared=100),
        at_end=StateDifference(compared=100),
        loaded=[ExpertRows(fqn, own, own, 8, placement) for fqn in NAMES],
    )


def given(outcome: ResumeOutcome, sources: dict[str, int]) -> ResumeOutcome:
    """Gives these parameters the experts of that rank after loading."""
    loaded = [
        replace(row, held=list(range(4 * sources[row.fqn], 4 * sources[row.fqn] + 4)))
        for row in outcome.loaded
    ]
    wrong = {row.fqn: 0.125 for row in loaded if row.held != row.declared}
    return replace(
        outcome,
        loaded=loaded,
        at_load=StateDifference(wrong, {f"{fqn} exp_avg": 2e-4 for fqn in wrong}, [], 100),
        at_end=StateDifference(dict.fromkeys(NAMES, 0.25), {}, [], 100),
        resumed=StepNumbers([4.75, 4.5], [0.8, 0.75]),
    )


def drifted(outcome: ResumeOutcome) -> ResumeOutcome:
    """Changes the steps after the save."""
    at_end = StateDifference({"lm_head.weight": 0.5}, {}, [], 100)
    return replace(outcome, resumed=StepNumbers([4.7, 4.5], [0.8, 0.7]), at_end=at_end)


def noisy(outcome: ResumeOutcome) -> ResumeOutcome:
    """Makes two uninterrupted runs differ in the last loss."""
    return replace(outcome, again=StepNumbers([*LOSSES[:3], 4.5], NORMS))


def evidence(*outcomes: ResumeOutcome | None) -> Evidence:
    """Evidence with one rank for each; None: the rank has no outcome."""
    seen = fsdp2_job(*[set() for _ in outcomes]).run()
    ranks = {
        rank: replace(
            one,
            outcome=Outcome(rank, losses=LOSSES, gradient_norms=NORMS, resume=outcomes[rank])
            if outcomes[rank] is not None
            else None,
        )
        for rank, one in seen.ranks.items()
    }
    return replace(seen, ranks=ranks)


def of(*outcomes: ResumeOutcome | None) -> Diagnosis:
    return diagnose(evidence(*outcomes))


class TestHealthy:
    def test_a_complete_resume_is_clean(self) -> None:
        """Its three tables, without the steps before the save, are with the stored answer."""
        found = of(healthy(0), healthy(1))
        assert (found.verdict, found.confidence) == (Verdict.CLEAN, Confidence.HIGH)
        assert "100 tensors of model and optimizer equal those at the save" in found.cause
        assert "steps 3 and 4 exactly those of the uninterrupted run" in found.cause
        assert found.signature == "clean"

    def test_at_another_layout_it_is_compared_with_the_state_in_memory(self) -> None:
        moved = [replace(healthy(rank), layout="dp_shard=1 x ep=2 = 2 ranks") for rank in (0, 1)]
        clean = of(*moved)
        assert clean.verdict == Verdict.CLEAN
        assert clean.cause.startswith("After saving and loading at dp_shard=1 x ep=2 = 2 ranks, ")
        assert "those of the run that got the same state in memory" in clean.cause
        assert "uninterrupted" not in clean.cause + str(clean.tables)
        drift = of(*map(drifted, moved)).cause
        assert "differ from the run that got the same state in memory" in drift
        assert "two runs from the same state in memory differ by 0" in drift
        assert (
            "Two runs from the same state in memory already differ" in of(*map(noisy, moved)).cause
        )

    def test_parameters_with_another_placement_have_separate_rows(self) -> None:
        one = healthy(0)
        other = replace(one, loaded=[*one.loaded[:-1], replace(one.loaded[-1], placement="plain")])
        experts = of(other, healthy(1)).tables[2]
        assert [row[1:] for row in experts.rows] == [
            (0, "0-3", "0-3", SHARD), (1, "4-7", "4-7", SHARD),
            (0, "0-3", "0-3", "plain"), (1, "4-7", "4-7", SHARD),
        ]  # fmt: skip
        bare = [replace(healthy(rank), loaded=[]) for rank in (0, 1)]
        assert len(of(*bare).tables) == 2

    def test_a_step_missing_in_one_run_has_empty_cells(self) -> None:
        short = replace(healthy(1), resumed=StepNumbers(LOSSES[2:3], [None, 0.7]))
        rows = of(healthy(0), short).tables[0].rows
        assert rows[1] == (3, 1, 4.7, 4.7, 0.0, 0.8, None, None)
        assert rows[3] == (4, 1, 4.6, None, None, 0.7, 0.7, 0.0)

    def test_a_norm_missing_in_both_runs_is_equal(self) -> None:
        numbers = StepNumbers(LOSSES, [None] * 4)
        bare = replace(healthy(1), straight=numbers, again=numbers,
                       resumed=StepNumbers(LOSSES[2:], [None] * 2))  # fmt: skip
        assert of(healthy(0), bare).verdict == Verdict.CLEAN
        other = replace(bare, again=StepNumbers(LOSSES, [None, None, None, 1.0]))
        assert of(healthy(0), other).verdict == Verdict.INCONCLUSIVE

    @pytest.mark.parametrize(
        ("after", "said"), [(3, "step 4 "), (2, "steps 3 and 4 "), (1, "steps 2 to 4 ")]
    )
    def test_cause_names_the_steps_after_the_save(self, after: int, said: str) -> None:
        resumed = StepNumbers(LOSSES[after:], NORMS[after:])
        found = of(*(replace(healthy(rank), after=after, resumed=resumed) for rank in (0, 1)))
        assert (
            f"on every rank, and {said}exactly those of the uninterrupted run (loss, "
            in found.cause
        )
        assert found.tables[0].title == f"4 steps against {after} + {4 - after}"
        last = StepNumbers([*LOSSES[after:-1], 4.5], NORMS[after:])
        end = StateDifference({"w": 0.5}, {}, [], 100)
        drifting = (
            replace(healthy(rank), after=after, resumed=last, at_end=end) for rank in (0, 1)
        )
        verb = "differs" if after == 3 else "differ"
        assert f"{said.capitalize()}then {verb} from the uninterrupted run: the loss by up to " in (
            of(*drifting).cause
        )

    def test_a_run_without_resume_is_not_judged(self) -> None:
        seen = evidence(healthy(0), healthy(1))
        ranks = {
            rank: replace(one, outcome=Outcome(rank, losses=LOSSES))
            for rank, one in seen.ranks.items()
        }
        found = diagnose(replace(seen, ranks=ranks))
        assert found.verdict == Verdict.INCONCLUSIVE
        assert found.tables == ()

    def test_a_rank_without_numbers_is_inconclusive(self) -> None:
        assert of(healthy(0), None).verdict == Verdict.INCONCLUSIVE


class TestExperts:
    def test_experts_of_one_rank_on_every_rank_are_reported(self) -> None:
        everything = dict.fromkeys(NAMES, 1)
        found = of(*(given(healthy(rank, "plain"), everything) for rank in (0, 1)))
        assert (found.verdict, found.confidence) == (Verdict.RESUME_DRIFT, Confidence.HIGH)
        assert found.cause.startswith(
            "After loading, every rank holds rank 1's experts 4-7 of layers 0 and 1, and experts "
            "0-3 are on no rank. They are plain tensors of one name on every rank, so "
            "torch.distributed.checkpoint took them for copies"
        )
        assert "4 tensors of the optimizer went with them" in found.cause
        assert (
            "the loss by up to 1.0e-01, the gradient norm by 5.0e-02, the weights at the end by "
            "2.5e-01; two uninterrupted runs differ by 0" in found.cause
        )
        assert found.signature == "resume-drift:one-rank-everywhere:no-rank"
        assert found.culprits == ()

    def test_table_shows_experts_before_and_after_the_resume(self) -> None:
        everything = dict.fromkeys(NAMES, 1)
        found = of(*(given(healthy(rank, "plain"), everything) for rank in (0, 1)))
        name = "model.layers.{0,1}.mlp.experts.{gate_up,down}_proj"
        assert found.tables[2].rows == (
            (name, 0, "0-3", "4-7", "plain"),
            (name, 1, "4-7", "4-7", "plain"),
        )

    def test_table_shows_state_differences_and_the_control(self) -> None:
        lost = given(healthy(1, "plain"), dict.fromkeys(NAMES, 0))
        ends = of(healthy(0, "plain"), noisy(lost)).tables[1]
        assert ends.rows[0] == (0, 0.0, 0.0, 0.0, 0.0, 0.0)
        assert ends.rows[1] == (1, 0.125, 2e-4, 0.25, 0.0, pytest.approx(0.1))

    def test_the_saving_library_is_named(self) -> None:
        lost = given(healthy(0, "plain"), dict.fromkeys(NAMES, 1))
        other = given(healthy(1, "plain"), dict.fromkeys(NAMES, 1))
        found = of(*(replace(one, through="accelerate") for one in (lost, other)))
        assert "so accelerate's save_state took them for copies" in found.cause

    def test_experts_mixed_from_several_ranks_are_reported(self) -> None:
        sources = dict(zip(NAMES, (1, 0, 0, 1), strict=True))
        found = of(*(given(healthy(rank, "plain"), sources) for rank in (0, 1)))
        assert "glued together from several ranks'" in found.cause
        assert "rank 0's (0-3) in model.layers.0.mlp.experts.down_proj" in found.cause
        assert "rank 1's (4-7) in model.layers.0.mlp.experts.gate_up_proj" in found.cause
        assert found.signature == "resume-drift:ranks-glued-together:no-rank"

    def test_moved_experts_are_listed_without_a_mechanism(self) -> None:
        swapped = [given(healthy(rank), dict.fromkeys(NAMES, 1 - rank)) for rank in (0, 1)]
        found = of(*swapped)
        assert "rank 0 holds 4-7 where it had 0-3; rank 1 holds 0-3 where it had 4-7" in found.cause
        assert "copies" not in found.cause
        assert found.signature == "resume-drift:experts-moved:no-rank"


class TestState:
    def test_other_lost_weights_are_found(self) -> None:
        lost = StateDifference({"lm_head.weight": 0.5}, {}, [], 100)
        found = of(healthy(0), replace(drifted(healthy(1)), at_load=lost))
        assert found.verdict == Verdict.RESUME_DRIFT
        assert "1 parameter on rank 1 differs from those at the save by up to 5.0e-01" in (
            found.cause
        )
        assert found.signature.startswith("resume-drift:weights")

    @pytest.mark.parametrize(
        ("after", "said"), [(3, "Step 4 still matches"), (2, "Steps 3 and 4 still match")]
    )
    def test_lost_weights_are_found_although_steps_agree(self, after: int, said: str) -> None:
        lost = StateDifference({"lm_head.weight": 0.5}, {}, [], 100)
        resumed = StepNumbers(LOSSES[after:], NORMS[after:])
        found = of(
            *(replace(healthy(r), after=after, resumed=resumed, at_load=lost) for r in (0, 1))
        )
        assert found.verdict == Verdict.RESUME_DRIFT
        assert f"{said} the uninterrupted run." in found.cause

    def test_copies_that_differed_before_the_save_are_not_blamed_on_it(self) -> None:
        lost = StateDifference({"lm_head.weight": 0.5}, {}, [], 100)
        apart = ["lm_head.weight", "model.norm.weight"]
        one = replace(healthy(0), apart=apart)
        other = replace(drifted(healthy(1)), at_load=lost, apart=apart)
        found = of(one, other)
        assert found.cause.startswith(
            "Before anything was saved, 2 parameters of which every rank has a copy had drifted "
        )
        assert found.signature.startswith("resume-drift:copies-were-apart")

    @pytest.mark.parametrize(
        ("lost", "said"),
        [
            (StateDifference({}, {"lm_head.weight exp_avg": 0.5}), "by up to 5.0e-01"),
            (StateDifference({}, {"lm_head.weight exp_avg": None}), "beyond measure"),
            (StateDifference({}, {}, ["lr 0.001, then 0.01"]), "lr 0.001, then 0.01"),
        ],
        ids=["other", "missing", "settings"],
    )
    def test_lost_optimizer_state_is_found(self, lost: StateDifference, said: str) -> None:
        found = of(*(replace(drifted(healthy(rank)), at_load=lost) for rank in (0, 1)))
        assert found.verdict == Verdict.RESUME_DRIFT
        assert "at the save; the optimizer" in found.cause
        assert said in found.cause
        assert found.signature.startswith("resume-drift:optimizer")

    def test_different_steps_with_equal_state_are_found(self) -> None:
        found = of(healthy(0), drifted(healthy(1)))
        assert found.verdict == Verdict.RESUME_DRIFT
        assert "something else they depend on was not saved" in found.cause
        assert found.signature.startswith("resume-drift:outside-the-state")

    def test_a_missing_step_is_a_difference(self) -> None:
        short = replace(healthy(1), resumed=StepNumbers(LOSSES[2:3], NORMS[2:3]))
        assert of(healthy(0), short).verdict == Verdict.RESUME_DRIFT


class TestControl:
    def test_different_control_runs_make_the_comparison_inconclusive(self) -> None:
        found = of(noisy(drifted(healthy(0))), drifted(healthy(1)))
        assert (found.verdict, found.confidence) == (Verdict.INCONCLUSIVE, Confidence.LOW)
        assert "Two uninterrupted runs already differ by up to 1.0e-01" in found.cause

    def test_a_control_with_a_different_final_state_is_inconclusive(self) -> None:
        control = StateDifference({}, {"lm_head.weight exp_avg": 1e-9}, [], 100)
        found = of(healthy(0), replace(healthy(1), control=control))
        assert found.verdict == Verdict.INCONCLUSIVE

    def test_lost_experts_need_no_control(self) -> None:
        everything = dict.fromkeys(NAMES, 1)
        found = of(*(noisy(given(healthy(rank, "plain"), everything)) for rank in (0, 1)))
        assert (found.verdict, found.confidence) == (Verdict.RESUME_DRIFT, Confidence.MEDIUM)
        assert "the steps after the save prove nothing" in found.cause
        assert "the loss by up to" not in found.cause


def test_outcome_round_trips_through_its_file(tmp_path) -> None:
    before = Outcome(1, resume=given(healthy(1, "plain"), dict.fromkeys(NAMES, 0)))
    assert Outcome.read(before.write(tmp_path)) == before
