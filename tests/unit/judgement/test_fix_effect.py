"""The effect of a fix on a failure, and reproduced claims; error messages never decide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moediag.lab.judgement.conclusion import conclude
from moediag.lab.judgement.fix_effect import claim, detector, effect, extent, stage
from moediag.result import TrialResult
from moediag.result.verdicts import OF_UPDATE
from tests.unit.trial_results import changed, trial_result

CHECKPOINT = "crash:CheckpointError:checkpoint.py check_recomputed_tensors_match:several-ranks"
COUNT = "Ranks 0, 1 raised CheckpointError: A different number of tensors was saved."
METADATA = "Ranks 0, 1 raised CheckpointError: Recomputed values have different metadata."


def trial(variant: str, role: str, verdict: str, **more: Any) -> TrialResult:
    return trial_result(variant, role, verdict=verdict, **more)


def crash(variant: str, role: str, signature: str = CHECKPOINT, cause: str = COUNT) -> TrialResult:
    return trial(variant, role, "crash", signature=signature, cause=cause)


def wrong(variant: str, role: str, error: float, *names: str) -> TrialResult:
    return trial(
        variant, role, "wrong-gradients", signature="wrong-gradients:no divergence seen:no-rank",
        gradient_error=error, wrong_parameters=names, parameters_compared=20,
    )  # fmt: skip


LOUD = crash("unfixed", "unfixed")
QUIET = wrong("permuted", "unfixed", 0.5, "a", "b")


@pytest.mark.parametrize(
    ("fix", "unfixed", "expected"),
    [
        (trial("f", "fix", "clean"), LOUD, "right"),
        # The same place, whatever the error reads: another text, another class of exception.
        (crash("f", "fix"), LOUD, "no effect"),
        (crash("f", "fix", cause=METADATA), LOUD, "no effect"),
        (crash("f", "fix", CHECKPOINT.replace("CheckpointError", "ValueError")), LOUD, "no effect"),
        (crash("f", "fix", CHECKPOINT.replace("several-ranks", "one-rank")), LOUD, "no effect"),
        # Another place is another failure.
        (crash("f", "fix", "crash:TypeError:functional.py linear:several-ranks"), LOUD, "wrong"),
        # Two failures without a place are not equal.
        (trial("f", "fix", "crash"), trial("unfixed", "unfixed", "crash"), "wrong"),
        # Silent or stuck instead of an error is worse; the reverse is not.
        (wrong("f", "fix", 1e-6, "a"), LOUD, "makes it worse"),
        (trial("f", "fix", "hang"), LOUD, "makes it worse"),
        (trial("f", "fix", "replica-divergence"), LOUD, "makes it worse"),
        (crash("f", "fix"), QUIET, "wrong"),
        (crash("f", "fix"), trial("myth", "unfixed", "clean"), "makes it worse"),
        # Silent failures are equal only with the same size and parameters.
        (wrong("f", "fix", 0.501, "b", "a"), QUIET, "no effect"),
        (wrong("f", "fix", 0.05, "a", "b"), QUIET, "wrong"),
        (wrong("f", "fix", 0.5, "a"), QUIET, "wrong"),
        # The same run without this fix is clean.
        (replace(crash("f", "fix"), clean_without="control"), LOUD, "makes it worse"),
        # Undecided.
        (trial("f", "fix", "inconclusive"), LOUD, ""),
        (trial("f", "fix", "not-applicable"), LOUD, ""),
        (crash("f", "fix"), trial("unfixed", "unfixed", "inconclusive"), "wrong"),
    ],
)
def test_each_effect_is_recognised(fix: TrialResult, unfixed: TrialResult, expected: str) -> None:
    assert effect([fix], [unfixed])[0] == expected


def test_only_a_changed_error_text_is_reported_as_such() -> None:
    assert effect([crash("f", "fix", cause=METADATA)], [LOUD])[1] == (
        "fails at the same place: only the error's text changed"
    )
    assert effect([crash("f", "fix")], [LOUD])[1] == "the same failure as without it"


def test_stage_is_the_verdict_and_signature_without_ranks_and_exception() -> None:
    assert stage(LOUD) == ("crash", "checkpoint.py check_recomputed_tensors_match")
    # Without a place the exception's class is used.
    assert stage(crash("f", "fix", "crash:KeyError:one-rank")) == ("crash", "KeyError")
    assert stage(crash("f", "fix", "crash:SIGABRT:one-rank")) == ("crash", "SIGABRT")


def test_worse_means_worse_than_every_symptom() -> None:
    silent = wrong("f", "fix", 0.1, "c")
    assert effect([silent], [LOUD, QUIET])[0] == "wrong"
    assert effect([silent], [LOUD])[0] == "makes it worse"
    assert effect([crash("f", "fix")], [QUIET, LOUD])[0] == "no effect", "it equals one of them"


def test_different_repeats_are_wrong_unless_one_makes_it_worse() -> None:
    clean, same = trial("f", "fix", "clean"), crash("f", "fix")
    assert effect([clean, same], [LOUD])[0] == "wrong"
    assert effect([same, same], [LOUD])[0] == "no effect"
    assert effect([clean, wrong("f", "fix", 0.1, "a")], [LOUD])[0] == "makes it worse"


def test_extent_names_the_error_and_its_detector() -> None:
    assert extent(QUIET) == (
        "2 of 20 gradients, largest error 5.0e-01, detected by gradients against the reference"
    )
    assert extent(LOUD) == (
        "detected by the exception, CheckpointError in checkpoint.py check_recomputed_tensors_match"
    )
    assert extent(trial("f", "fix", "crash")) == "detected by the exception"
    weights = trial("f", "fix", "wrong-weights", signature="wrong-weights:lost:one-rank")
    assert extent(weights) == "detected by weights against the checkpoint"
    for name in OF_UPDATE:
        left = changed(weights, signature=f"wrong-weights:{name}:one-rank")
        assert extent(left) == "detected by what the optimizer left against the reference"
    of_inputs = wrong("f", "fix", 0.0)
    assert extent(of_inputs) == "detected by gradients of the blocks' inputs against the reference"
    norm = trial("f", "fix", "wrong-gradients", signature="wrong-gradients:clipping norm:no-rank")
    assert extent(norm) == "detected by the clipping norm against the reference"


def test_a_clean_trial_has_no_detector() -> None:
    assert detector(trial("f", "fix", "clean")) == ""


def test_remark_on_a_worse_fix_names_the_failure_and_its_detector() -> None:
    silent = wrong("f", "fix", 0.25, "a")
    assert effect([silent], [LOUD])[1] == (
        "silently wrong where the verdict without it is crash: 1 of 20 gradients, largest error "
        "2.5e-01, detected by gradients against the reference"
    )
    assert effect([trial("f", "fix", "hang")], [LOUD])[1] == (
        "hangs where the verdict without it is crash: "
        "detected by ranks that wait in a collective without progress"
    )
    assert effect([trial("f", "fix", "crash")], [trial("myth", "unfixed", "clean")])[1] == (
        "fails where the verdict without it is clean: detected by the exception"
    )
    regresses = replace(trial("f", "fix", "crash"), clean_without="control")
    assert effect([regresses], [LOUD])[1] == (
        "detected by the exception; the same run without it is clean (control)"
    )


def test_another_exception_class_at_the_same_place_is_reported() -> None:
    other = crash("f", "fix", CHECKPOINT.replace("CheckpointError", "ValueError"), METADATA)
    assert effect([other], [LOUD]) == (
        "no effect",
        "fails at the same place: only the error, from CheckpointError to ValueError, changed",
    )


def test_missing_or_undecided_trials_have_no_effect() -> None:
    assert effect([], [LOUD]) == ("", "")
    undecided = trial("f", "fix", "inconclusive")
    assert effect([trial("f", "fix", "clean"), undecided], [LOUD]) == ("", "")
    assert effect([trial("f", "fix", "clean")], [LOUD]) == ("right", "")


def test_silent_failures_of_unknown_size_are_equal() -> None:
    unsized = changed(QUIET, gradient_error=None)
    fix = changed(unsized, signature=QUIET.signature)
    assert effect([replace(fix, variant="f")], [unsized])[0] == "no effect"
    assert effect([replace(fix, variant="f")], [QUIET])[0] == "wrong"
    assert effect([wrong("f", "fix", 0.5, "a", "b")], [unsized])[0] == "wrong"


@pytest.mark.parametrize(("error", "same"), [(0.5049, True), (0.506, False), (0.4951, True)])
def test_errors_within_one_percent_are_equal(error: float, same: bool) -> None:
    found = effect([wrong("f", "fix", error, "a", "b")], [QUIET])[0]
    assert found == ("no effect" if same else "wrong")


@pytest.mark.parametrize(
    ("trials", "reproduced", "said"),
    [
        ([LOUD], True, "crash, detected by the exception"),
        ([LOUD, LOUD], True, "crash"),
        ([trial("m", "unfixed", "clean", parameters_compared=9, gradient_error=1e-8)], False,
         "2 ranks ran to the end, 9 gradients match the reference (largest error 1.0e-08)"),
        ([replace(LOUD, met=False)], False, "another failure than the claimed one: crash"),
        ([LOUD, changed(LOUD, verdict="clean", met=False)], None, "repeats disagree"),
        ([trial("u", "unfixed", "inconclusive", cause="lost")], None, "lost"),
        ([replace(LOUD, must_show="hang")], False, "crash"),
    ],
)  # fmt: skip
def test_each_claim_is_judged(
    trials: list[TrialResult], reproduced: bool | None, said: str
) -> None:
    judged = claim(trials)
    assert judged.reproduced is reproduced
    assert judged.what.startswith(said)


def test_a_fix_is_compared_with_the_failure_it_repairs() -> None:
    silent = wrong("f", "fix", 0.5, "a", "b")
    trials = [LOUD, QUIET, silent, replace(silent, variant="g", repairs="unfixed")]
    judged = {f.variant: f.effect for f in conclude(trials).fixes}
    assert judged == {"f": "no effect", "g": "makes it worse"}
    assert [(c.variant, c.reproduced) for c in conclude(trials).claims] == [
        ("unfixed", True),
        ("permuted", True),
    ]
