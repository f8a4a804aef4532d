"""What `moediag verify` finds in measurements: each failure by name and factor, none in a healthy
job, and no verdict where runs cannot be compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moediag.protocol.tolerance import GRADIENT
from moediag.ranks.verify import comparison, noise, updates
from moediag.ranks.verify.runs import Alone, Run
from moediag.ranks.verify.tensor_files import Stored
from moediag.recorder.step.pieces import Where
from moediag.result import Verdict
from tests.unit.measured_runs import EXPERTS, Job, gradients, judged, reference, same


@pytest.mark.parametrize("sharded", [False, True])
def test_a_healthy_job_is_clean(tmp_path: Path, sharded: bool) -> None:
    job = Job(tmp_path / "job", sharded=sharded, steps=2, noise=1e-6)
    found = judged(job, reference(tmp_path, steps=2))
    assert found.verdict == Verdict.CLEAN
    assert found.parameters_compared == 4


def test_expert_gradients_times_ep_are_named_with_the_factor(tmp_path: Path) -> None:
    def times_ep(rank: int, name: str, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2 if name == EXPERTS else gradient

    job = Job(tmp_path / "job", sharded=True, change=times_ep)
    found = judged(job, reference(tmp_path), {"ep": 2})
    assert found.verdict == Verdict.WRONG_GRADIENTS
    assert found.wrong_parameters == (EXPERTS,)
    assert "the experts are 2.000 times the reference" in found.cause
    assert "2 is the size of all ranks" in found.cause or "summed over" in found.cause


def test_gradients_divided_twice_are_a_factor_of_all_parts(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", change=lambda rank, name, gradient: gradient / 2)
    found = judged(job, reference(tmp_path))
    assert found.verdict == Verdict.WRONG_GRADIENTS
    assert "0.500 times the reference" in found.cause
    assert "divided by it once too many times" in found.cause


def test_a_missing_gradient_is_wrong(tmp_path: Path) -> None:
    job = Job(
        tmp_path / "job",
        change=lambda rank, name, g: None if name == "head.weight" else g,
    )
    found = judged(job, reference(tmp_path))
    assert found.verdict == Verdict.WRONG_GRADIENTS
    assert found.wrong_parameters == ("head.weight",)


def test_another_learning_rate_on_one_rank_names_that_rank(tmp_path: Path) -> None:
    found = judged(Job(tmp_path / "job", rates={1: 2e-2}), reference(tmp_path))
    assert found.verdict == Verdict.WRONG_WEIGHTS
    assert found.culprits == (1,)
    assert "learning rate" in found.cause
    assert "0.02" in found.cause


def test_the_same_other_learning_rate_on_all_ranks_is_not_judged(tmp_path: Path) -> None:
    found = judged(Job(tmp_path / "job", rates={0: 2e-2, 1: 2e-2}), reference(tmp_path))
    assert found.verdict == Verdict.CLEAN
    assert any("the learning rate is 0.02 on every rank" in text for text in found.not_seen)


def test_a_forgotten_optimizer_state_shows_in_the_weights(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", moves=lambda rank, name, update: update.sign() * 1e-2)
    found = judged(job, reference(tmp_path))
    assert found.verdict == Verdict.WRONG_WEIGHTS
    assert "After step 1 the weights of 4 of 4 parameters" in found.cause


@pytest.mark.parametrize("gradient_in_step_1", [False, True])
def test_weights_that_had_no_gradient_in_step_1_are_not_judged_after_step_2(
    tmp_path: Path, gradient_in_step_1: bool
) -> None:
    """An optimizer may have moved them in step 1 by rounding alone, and step 2 does not undo it."""

    def from_step_2_on(rank: int, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        first = torch.allclose(gradient, gradients(1)[name])
        return None if name == EXPERTS and first and not gradient_in_step_1 else gradient

    def further(rank: int, name: str, update: torch.Tensor) -> torch.Tensor:
        return update * 2 if name == EXPERTS else update

    runs = reference(tmp_path, steps=2, change=from_step_2_on)
    found = judged(Job(tmp_path / "job", steps=2, change=from_step_2_on, moves=further), runs)
    assert found.verdict == (Verdict.WRONG_WEIGHTS if gradient_in_step_1 else Verdict.CLEAN)


def test_a_norm_without_the_experts_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", norms={0: 5.0, 1: 5.0}, moves=lambda rank, name, update: update * 2)
    found = judged(job, reference(tmp_path, norms={0: 10.0}))
    assert found.verdict == Verdict.WRONG_GRADIENTS
    assert "norm" in found.cause


def test_norms_that_differ_between_ranks_are_found(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", norms={0: 10.0, 1: 7.0})
    found = judged(job, reference(tmp_path, norms={0: 10.0}))
    assert found.verdict == Verdict.REPLICA_DIVERGENCE


def test_an_equal_norm_is_healthy(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", norms={0: 10.0, 1: 10.0})
    assert judged(job, reference(tmp_path, norms={0: 10.0})).verdict == Verdict.CLEAN


# ------------------------------------------------------------------------ trained otherwise

ROUTER = "layers.0.mlp.gate.weight"


def test_a_router_that_only_the_job_freezes_is_named(tmp_path: Path) -> None:
    found = judged(Job(tmp_path / "job", frozen=(ROUTER,)), reference(tmp_path))
    assert found.verdict == Verdict.WRONG_GRADIENTS
    assert found.wrong_parameters == (ROUTER,)
    assert f"{ROUTER} does not require a gradient (requires_grad is False) on" in found.cause


def test_a_router_that_only_the_reference_freezes_is_named(tmp_path: Path) -> None:
    found = judged(Job(tmp_path / "job"), reference(tmp_path, frozen=(ROUTER,)))
    assert found.verdict == Verdict.WRONG_GRADIENTS
    assert f"{ROUTER} does not require a gradient in one process" in found.cause


def test_what_both_freeze_is_healthy(tmp_path: Path) -> None:
    found = judged(Job(tmp_path / "job", frozen=(ROUTER,)), reference(tmp_path, frozen=(ROUTER,)))
    assert found.verdict == Verdict.CLEAN


@pytest.mark.parametrize("foreign", [False, True])
def test_a_parameter_that_no_optimizer_has_is_named(tmp_path: Path, foreign: bool) -> None:
    """Unless an optimizer has parameters of no model: they may be copies."""
    job = Job(tmp_path / "job", left_out=(ROUTER,), foreign=foreign)
    found = judged(job, reference(tmp_path))
    assert found.verdict == (Verdict.CLEAN if foreign else Verdict.WRONG_WEIGHTS)
    assert (f"No optimizer that stepped has {ROUTER}, on ranks 0, 1" in found.cause) != foreign


@pytest.mark.parametrize("forgot", [False, True])
def test_an_optimizer_that_began_without_its_state_is_said(tmp_path: Path, forgot: bool) -> None:
    def fresh(rank: int, name: str, update: torch.Tensor) -> torch.Tensor:
        return update.sign() * 1e-2 if forgot else update

    job = Job(tmp_path / "job", updates=1.0 if forgot else 4.0, moves=fresh)
    found = judged(job, reference(tmp_path, updates=4.0))
    assert found.verdict == (Verdict.WRONG_WEIGHTS if forgot else Verdict.CLEAN)
    assert ("has counted 1 update by then, 4 in one process" in found.cause) == forgot


@pytest.mark.parametrize("summed", [False, True])
def test_a_stage_with_the_other_name_of_a_shared_embedding(tmp_path: Path, summed: bool) -> None:
    def part(rank: int, name: str, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if summed or name != "head.weight" else gradient - gradient.sign() * 0.1

    job = Job(tmp_path / "job", renamed={"head.weight": "embed.weight"}, change=part)
    found = judged(job, reference(tmp_path, tied={"embed.weight": "head.weight"}))
    assert found.verdict == (Verdict.CLEAN if summed else Verdict.WRONG_GRADIENTS)
    assert found.wrong_parameters == (() if summed else ("embed.weight",))


def test_ranks_that_repeat_each_other_are_named(tmp_path: Path) -> None:
    """Those that average their gradients; others may share a model."""
    job = Job(tmp_path / "job", samples={1: ["s0", "s1"]}, averages=(0, 1))
    found = judged(job, reference(tmp_path))
    assert found.verdict == Verdict.WRONG_GRADIENTS
    assert "Ranks 0, 1 average their gradients and saw the same 2 samples" in found.cause
    assert "DistributedSampler" in found.next_step


# ------------------------------------------------------------------------ not comparable


def test_different_samples_prove_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", samples={1: ["x", "y"]}, change=lambda r, n, g: g * 2)
    found = judged(job, reference(tmp_path))
    assert found.verdict == Verdict.INCONCLUSIVE
    assert "2 of the reference's 4 samples" in found.cause
    assert "batch size" in found.next_step


def test_ranks_that_saw_the_same_samples_are_said(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", samples={1: ["s0", "s1"]})
    found = judged(job, reference(tmp_path))
    assert found.verdict == Verdict.INCONCLUSIVE
    assert "ranks 0, 1 saw the same samples" in found.cause


@pytest.mark.parametrize(
    ("job", "single", "words"),
    [
        ({"random": True}, {}, "random numbers"),
        ({"across": "BatchNorm2d"}, {}, "BatchNorm2d"),
        ({"without": (1,)}, {}, "ranks 1 measured nothing"),
        ({"without": (0, 1)}, {}, "the distributed run took no optimizer step that moediag could"),
        ({"problems": ("the disk is full",)}, {}, "the disk is full"),
        ({}, {"problems": ("head.weight: it has shape [1]",)}, "head.weight"),
        ({}, {"world": 2}, "the reference ran as 2 ranks"),
    ],
)
def test_what_cannot_be_compared_is_inconclusive(
    tmp_path: Path, job: dict[str, object], single: dict[str, object], words: str
) -> None:
    options = {"change": lambda rank, name, gradient: gradient * 2, **job}
    found = judged(Job(tmp_path / "job", **options), reference(tmp_path, **single))  # type: ignore[arg-type]
    assert found.verdict == Verdict.INCONCLUSIVE
    assert words.lower() in found.cause.lower()


def test_a_reference_that_differs_from_itself_proves_nothing(tmp_path: Path) -> None:
    runs = reference(tmp_path)
    runs[1] = Job(tmp_path / "other", world=1, change=lambda r, n, g: g * 1.5).write()
    found = judged(Job(tmp_path / "job", change=lambda r, n, g: g * 2), runs)
    assert found.verdict == Verdict.INCONCLUSIVE
    assert "not deterministic" in found.cause


def test_rounding_that_changes_gradients_much_proves_nothing(tmp_path: Path) -> None:
    runs = reference(tmp_path)
    runs[2] = Job(tmp_path / "other", world=1, change=lambda r, n, g: g * 1.5).write()
    found = judged(Job(tmp_path / "job", change=lambda r, n, g: g * 2), runs)
    assert found.verdict == Verdict.INCONCLUSIVE
    assert "Rounding alone" in found.cause


def test_an_error_as_large_as_rounding_is_no_failure(tmp_path: Path) -> None:
    def rounded(rank: int, name: str, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1.02

    runs = reference(tmp_path, dtypes=("bfloat16",))
    runs[2] = Job(
        tmp_path / "noisy", world=1, change=lambda r, n, g: g * 1.01, dtypes=("bfloat16",)
    ).write()
    assert judged(Job(tmp_path / "a", change=rounded), runs).verdict == Verdict.CLEAN
    exact = reference(tmp_path / "exact")
    assert judged(Job(tmp_path / "b", change=rounded), exact).verdict == Verdict.WRONG_GRADIENTS


@pytest.mark.parametrize(("usual", "one"), [(0.01, 0.001), (0.001, 0.01)])
def test_what_rounding_may_do_is_the_most_of_what_was_measured(usual: float, one: float) -> None:
    """One run is one sample, and for a small parameter a lucky one."""
    measured = noise.Noise({"w": 0.0, "v": 0.5}, usual, one)
    assert measured.allowed("w", 2.0) == pytest.approx(noise.TIMES * 0.02)
    assert measured.allowed("v", 2.0) == pytest.approx(noise.TIMES * 0.5)
    assert noise.Noise({}, 0.0, 0.0).allowed("w", 2.0) == 2 * GRADIENT.floor


def test_a_missing_gradient_of_a_part_is_wrong_by_the_whole(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", sharded=True, change=lambda r, n, g: None if n == EXPERTS else g)
    runs = [Run.read(one) for one in reference(tmp_path)]
    largest = float(gradients(1)[EXPERTS].abs().max())
    for outcome in comparison.outcomes(Run.read(job.write()), runs):
        assert outcome.gradients["1"][EXPERTS].max_abs == pytest.approx(largest)


@pytest.mark.parametrize(("micro_batches", "losses"), [(1, [1.0, 1.0]), (2, [])])
def test_losses_are_compared_where_a_step_has_one(
    tmp_path: Path, micro_batches: int, losses: list[float]
) -> None:
    """How a program scales the losses of several micro-batches is not known."""
    job = Run.read(Job(tmp_path / "job", steps=2, micro_batches=micro_batches).write())
    runs = [Run.read(one) for one in reference(tmp_path, steps=2)]
    for outcome in comparison.outcomes(job, runs):
        assert outcome.losses == losses
        assert outcome.reference_losses == losses


def test_only_steps_with_the_same_samples_are_compared(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=1, change=same)
    found = judged(job, reference(tmp_path, steps=2))
    assert found.verdict == Verdict.CLEAN


def test_tokens_that_rounding_routes_otherwise_prove_nothing(tmp_path: Path) -> None:
    def flipped(rank: int, name: str, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.eye(8, 6) if name == EXPERTS else gradient

    low = reference(tmp_path / "low", dtypes=("bfloat16",))
    found = judged(Job(tmp_path / "a", change=flipped), low)
    assert found.verdict == Verdict.INCONCLUSIVE
    assert "other experts" in found.cause
    found = judged(Job(tmp_path / "b", change=lambda r, n, g: g * 2), low)
    assert found.verdict == Verdict.WRONG_GRADIENTS
    exact = reference(tmp_path / "exact")
    found = judged(Job(tmp_path / "c", change=flipped), exact)
    assert found.verdict == Verdict.WRONG_GRADIENTS
    assert "auxiliary loss" in found.next_step


def test_an_auxiliary_loss_explains_another_direction_only(tmp_path: Path) -> None:
    def turned(rank: int, name: str, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.eye(*gradient.shape[-2:])

    runs = reference(tmp_path)
    found = judged(Job(tmp_path / "a", change=turned, auxiliary=True), runs)
    assert found.verdict == Verdict.INCONCLUSIVE
    assert "auxiliary loss" in found.cause
    found = judged(Job(tmp_path / "b", change=lambda r, n, g: g * 2, auxiliary=True), runs)
    assert found.verdict == Verdict.WRONG_GRADIENTS
    assert judged(Job(tmp_path / "c", auxiliary=True), runs).verdict == Verdict.CLEAN


def test_rounding_of_a_step_does_not_make_the_next_one_wrong(tmp_path: Path) -> None:
    def later(rank: int, name: str, gradient: torch.Tensor) -> torch.Tensor:
        second = gradients(2)[name]
        return gradient * (1.01 if torch.allclose(gradient, second) else 1.0)

    job = Job(tmp_path / "job", steps=2, change=later)
    assert judged(job, reference(tmp_path, steps=2)).verdict == Verdict.CLEAN


@pytest.mark.parametrize(("factor", "layout"), [(0.5, {}), (0.25, {"ep": 2})])
def test_a_factor_that_is_the_number_of_micro_batches_is_not_only_a_mesh_axis(
    tmp_path: Path, factor: float, layout: dict[str, int]
) -> None:
    job = Job(tmp_path / "job", change=lambda r, n, g: g * factor, micro_batches=round(1 / factor))
    found = judged(job, reference(tmp_path), layout)
    assert f"{round(1 / factor)} is the number of micro-batches of a step" in found.cause
    assert ("all ranks has the same" in found.cause) == (factor == 0.5)


def test_what_rounding_did_in_a_step_and_in_the_update() -> None:
    def alone(by: float) -> Alone:
        w, v = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([4.0])
        weights = {"w": w * (0.8 + by), "v": v, "u": v}
        return Alone({"w": w, "v": v, "u": v}, [{"w": w + by, "v": v, "u": None}], [weights])

    measured = noise.of_step(alone(0), alone(0.0625), alone(-0.25), 1, ["bfloat16", "int64"])
    assert measured == noise.Noise({"w": 0.25, "v": 0.0}, 0.0, 2**-8, GRADIENT.floor)
    later = noise.of_step(alone(0), alone(0), Alone({}, [{}]), 1, ["float32"])
    assert (later.largest, later.usual) == ({"w": 2.0, "v": 4.0}, 1.0)
    assert noise.disagreement({"w": torch.tensor([3.0, 4.0]), "v": None}, {}) == 1.0

    compared = updates.Updates(alone(0), alone(0.001))
    compared.step(1, noise.Noise({"w": 0.015}, 0.0, 0.0))  # 0.5 is just clear
    start = alone(0).start

    def errors(w: list[float], **more: torch.Tensor) -> dict[str, object]:
        after = {"w": torch.tensor(w), "v": start["v"], **more}
        both = [{n: Stored(Where("whole", tuple(t.shape)), t) for n, t in one.items()}
                for one in (start, after)]  # fmt: skip
        return {n: (round(e.max_abs, 4), round(e.scale, 4), e.wrong)
                for n, e in compared.compare(1, *both).items()}  # fmt: skip

    right = [0.8, -1.6, 0.4]
    still = {"v": (0.0, 0.0, False)}
    assert errors(right) == {"w": (0.0, 0.4, False), **still}
    # Allowed are a tenth of the update and eight times what rounding does to it.
    assert errors([0.8, -1.5381, 0.4]) == {"w": (0.0619, 0.4, False), **still}
    assert errors([0.8, -1.5353, 0.4]) == {"w": (0.0647, 0.4, True), **still}
    assert errors([0.8, -1.6, 0.32]) == {"w": (0.08, 0.4, True), **still}
