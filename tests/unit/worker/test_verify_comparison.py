"""What `moediag verify` finds in measurements: each failure by name and factor, none in a healthy
job, and no verdict where runs cannot be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moediag.protocol.tolerance import GRADIENT
from moediag.ranks.verify import comparability, comparison, noise, updates
from moediag.ranks.verify.runs import Alone, Run
from moediag.ranks.verify.tensor_files import Stored
from moediag.recorder.step.pieces import WHOLE, Where
from moediag.result import Verdict
from tests import golden_lines
from tests.unit.measured_runs import EXPERTS, Change, Job, gradients, judged, reference

ROUTER = "layers.0.mlp.gate.weight"


def of(name: str, by: float | None) -> Change:
    """Multiplies one parameter's tensors; None: it has none."""
    return lambda _, n, tensor: tensor if n != name else None if by is None else tensor * by


def times(by: float) -> Change:
    return lambda rank, name, tensor: tensor * by


def forgets(rank: int, name: str, update: torch.Tensor) -> torch.Tensor:
    """What AdamW's first step does."""
    return update.sign() * 1e-2


def from_step_2_on(rank: int, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
    first = torch.allclose(gradient, gradients(1)[name])
    return None if name == EXPERTS and first else gradient


def rounds_step_2(rank: int, name: str, gradient: torch.Tensor) -> torch.Tensor:
    return gradient * (1.01 if torch.allclose(gradient, gradients(2)[name]) else 1.0)


def lacks_a_part(rank: int, name: str, gradient: torch.Tensor) -> torch.Tensor:
    return gradient - gradient.sign() * 0.1 if name == "head.weight" else gradient


TIED: dict[str, Any] = {"renamed": {"head.weight": "embed.weight"}}
EMBEDS = {"tied": {"embed.weight": "head.weight"}}
TEN = {"norms": {0: 10.0}}
# name: verdict, the job, the reference, the layout. What is beside it: tests/golden/verify.json.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, int]]] = {
    "healthy": ("clean", {"steps": 2, "noise": 1e-6}, {"steps": 2}, {}),
    "healthy, sharded": ("clean", {"steps": 2, "noise": 1e-6, "sharded": True}, {"steps": 2}, {}),
    "experts times ep": (
        "wrong-gradients", {"sharded": True, "change": of(EXPERTS, 2)}, {}, {"ep": 2},
    ),
    "divided twice": ("wrong-gradients", {"change": times(0.5)}, {}, {}),
    "a gradient is missing": ("wrong-gradients", {"change": of("head.weight", None)}, {}, {}),
    "another learning rate on one rank": ("wrong-weights", {"rates": {1: 2e-2}}, {}, {}),
    "another learning rate on all ranks": ("clean", {"rates": {0: 2e-2, 1: 2e-2}}, {}, {}),
    "a forgotten optimizer state": ("wrong-weights", {"moves": forgets}, {}, {}),
    "further in both steps": (
        "wrong-weights", {"steps": 2, "moves": of(EXPERTS, 2)}, {"steps": 2}, {},
    ),
    # An optimizer may have moved them in step 1 by rounding alone; step 2 does not undo it.
    "further, without a gradient in step 1": (
        "clean", {"steps": 2, "change": from_step_2_on, "moves": of(EXPERTS, 2)},
        {"steps": 2, "change": from_step_2_on}, {},
    ),
    "rounding of a step does not make the next one wrong": (
        "clean", {"steps": 2, "change": rounds_step_2}, {"steps": 2}, {},
    ),
    "only steps with the same samples are compared": ("clean", {"steps": 1}, {"steps": 2}, {}),
    "a norm without the experts": (
        "wrong-gradients", {"norms": {0: 5.0, 1: 5.0}, "moves": times(2)}, TEN, {},
    ),
    "norms differ between ranks": ("replica-divergence", {"norms": {0: 10.0, 1: 7.0}}, TEN, {}),
    "an equal norm": ("clean", {"norms": {0: 10.0, 1: 10.0}}, TEN, {}),
    "only the job freezes": ("wrong-gradients", {"frozen": (ROUTER,)}, {}, {}),
    "only the reference freezes": ("wrong-gradients", {}, {"frozen": (ROUTER,)}, {}),
    "both freeze": ("clean", {"frozen": (ROUTER,)}, {"frozen": (ROUTER,)}, {}),
    "no optimizer has it": ("wrong-weights", {"left_out": (ROUTER,)}, {}, {}),
    # An optimizer has parameters of no model: they may be copies.
    "perhaps no optimizer has it": ("clean", {"left_out": (ROUTER,), "foreign": True}, {}, {}),
    "updates are counted anew": (
        "wrong-weights", {"updates": 1.0, "moves": forgets}, {"updates": 4.0}, {},
    ),
    "updates are counted on": ("clean", {"updates": 4.0}, {"updates": 4.0}, {}),
    "a stage has the other name of a shared embedding": ("clean", TIED, EMBEDS, {}),
    "a shared embedding is not summed": (
        "wrong-gradients", {**TIED, "change": lacks_a_part}, EMBEDS, {},
    ),
    # Others may share a model.
    "ranks that average repeat each other": (
        "wrong-gradients", {"samples": {1: ["s0", "s1"]}, "averages": (0, 1)}, {}, {},
    ),
    "the number of micro-batches and of ranks": (
        "wrong-gradients", {"change": times(0.5), "micro_batches": 2}, {}, {},
    ),
    "the number of micro-batches": (
        "wrong-gradients", {"change": times(0.25), "micro_batches": 4}, {}, {"ep": 2},
    ),
    **{
        f"not comparable: {why}": ("inconclusive", {"change": times(2), **job}, single, {})
        for why, job, single in [
            ("different samples", {"samples": {1: ["x", "y"]}}, {}),
            ("ranks saw the same samples", {"samples": {1: ["s0", "s1"]}}, {}),
            ("random numbers", {"random": True}, {}),
            ("BatchNorm2d", {"across": "BatchNorm2d"}, {}),
            ("a rank measured nothing", {"without": (1,)}, {}),
            ("no rank measured", {"without": (0, 1)}, {}),
            ("the disk is full", {"problems": ("the disk is full",)}, {}),
            ("of the reference", {}, {"problems": ("head.weight: it has shape [1]",)}),
            ("a reference of 2 ranks", {}, {"world": 2}),
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_whole_answer(name: str, tmp_path: Path) -> None:
    verdict, job, single, layout = CASES[name]
    found = judged(Job(tmp_path / "job", **job), reference(tmp_path, **single), layout)
    assert found.verdict == verdict
    wanted = (
        "confidence", "culprits", "victims", "cause", "next_step", "notes", "not_seen", "signature",
        "wrong_parameters", "parameters_compared",
    )  # fmt: skip
    golden_lines.hold("verify.json", name, {n: v for n in wanted if (v := getattr(found, n))})


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


@pytest.mark.parametrize(
    ("own", "whole", "tied", "apart"),
    [
        ([1.0, 2.0], [1.0, 2.0], {"embed": "head"}, False),
        ([1.0, 2.0], [1.0, 3.0], {"embed": "head"}, True),
        ([1.0, 2.0], [1.0, 3.0], {"embed": "other"}, False),  # one process has no such parameter
        (None, [1.0, 3.0], {"embed": "head"}, False),  # of another rank
    ],
)
def test_a_shared_parameter_begins_equal(own: Any, whole: Any, tied: Any, apart: bool) -> None:
    held = Stored(Where(WHOLE, (2,)), None if own is None else torch.tensor(own))
    start = Alone({"head": torch.tensor(whole)})
    found = comparability.tied_apart({0: {"embed": held}}, start, tied)
    assert (found is not None) == apart
    assert found is None or "embed on rank 0 did not begin with the values of head" in found.reason


@pytest.mark.parametrize(
    ("second", "why"),
    [({"steps": 0}, "it took no optimizer step then"), ({"problems": ("no disk",)}, "no disk")],
)
def test_a_second_run_that_was_not_measured(tmp_path: Path, second: Any, why: str) -> None:
    runs = reference(tmp_path)
    runs[1] = Job(tmp_path / "other", world=1, **second).write()
    found = judged(Job(tmp_path / "job"), runs)
    assert found.verdict == Verdict.INCONCLUSIVE
    assert f"could not be run a second time: {why}" in found.cause


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("by", [-1, 1, 2, 6])
def test_gradients_that_are_read_one_element_late(tmp_path: Path, sharded: bool, by: int) -> None:
    """Further than a few elements is not told."""

    def late(rank: int, name: str, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.reshape(-1).roll(by).view(gradient.shape)

    found = judged(
        Job(tmp_path / "job", change=late, sharded=sharded), reference(tmp_path / "alone")
    )
    assert found.verdict == Verdict.WRONG_GRADIENTS
    assert ("is that of an element near it" in found.cause) is (abs(by) < 6)
