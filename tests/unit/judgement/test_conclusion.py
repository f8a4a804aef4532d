"""Expectations, and the conclusion of all trials."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from moediag.lab.judgement.conclusion import conclude, met
from moediag.result import Confidence, Diagnosis, TrialResult, Verdict
from tests.unit.trial_results import trial_result


@dataclass
class Expected:
    verdict: Any
    culprits: list[int] | None = None
    pattern: str | None = None


def diagnosis(verdict: str, *culprits: int) -> Diagnosis:
    return Diagnosis(Verdict(verdict), "s", Confidence.HIGH, culprits=culprits)


@pytest.mark.parametrize(
    ("expected", "found", "result"),
    [
        (None, diagnosis("clean"), True),
        (None, diagnosis("hang"), False),
        (Expected("hang"), diagnosis("hang", 1), True),
        (Expected("hang"), diagnosis("collective-mismatch", 1), False),
        (Expected(["hang", "collective-mismatch"]), diagnosis("collective-mismatch"), True),
        (Expected({"gloo": "collective-mismatch", "nccl": "hang"}), diagnosis("hang"), False),
        (Expected({"gloo": ["hang", "crash"]}), diagnosis("crash"), True),
        (Expected({"nccl": "hang"}), diagnosis("hang"), False),
        (Expected("hang", [1]), diagnosis("hang", 1), True),
        (Expected("hang", [1]), diagnosis("hang", 0), False),
        (Expected("hang", [1, 0]), diagnosis("hang", 0, 1), True),
        (Expected("hang", [1]), diagnosis("hang"), False),
        (Expected("hang", []), diagnosis("hang", 1), False),
        (Expected(["clean", "hang"], [1]), diagnosis("clean"), True),
        (Expected("clean"), diagnosis("inconclusive"), False),
    ],
)
def test_expectations_are_met(expected: Expected | None, found: Diagnosis, result: bool) -> None:
    assert met(expected, found, "gloo") is result


def test_another_signature_with_the_same_verdict_is_not_met() -> None:
    found = replace(diagnosis("hang", 1), signature="hang:one-kind reduce:dp_shard:one-rank")
    assert met(Expected("hang", pattern="one-kind reduce"), found, "gloo")
    assert not met(Expected("hang", pattern="reduce"), found, "gloo"), (
        "a whole part, not some letters"
    )
    assert not met(Expected("hang", pattern="other"), found, "gloo")
    assert not met(Expected("hang", [0], pattern="dp_shard"), found, "gloo")
    assert met(Expected(["clean", "hang"], pattern="dp_shard"), diagnosis("clean"), "gloo")


def test_expectations_depend_on_the_backend() -> None:
    both = Expected({"gloo": "collective-mismatch", "nccl": "hang"})
    assert met(both, diagnosis("hang"), "nccl")
    assert not met(both, diagnosis("hang"), "gloo")


def trial(
    variant: str,
    role: str,
    verdict: str,
    met: bool = True,
    ratio: float | None = None,
    spread: tuple[float, float] | None = None,
) -> TrialResult:
    return trial_result(
        variant, role, verdict=verdict, expected=verdict if met else "x", met=met, signature="s",
        step_time_ratio=ratio, step_time_spread=spread,
    )  # fmt: skip


UNFIXED = trial("unfixed", "unfixed", "collective-mismatch")
CONTROL = trial("identical", "control", "clean")


@pytest.mark.parametrize(
    ("trials", "reproduced"),
    [
        ([UNFIXED, CONTROL], True),
        ([UNFIXED], True),
        ([CONTROL], None),
        ([], None),
        ([trial("unfixed", "unfixed", "clean", met=False), CONTROL], False),
        # A different failure never counts as the one looked for.
        ([trial("unfixed", "unfixed", "crash", met=False)], False),
        ([trial("unfixed", "unfixed", "inconclusive", met=False)], None),
        ([trial("unfixed", "unfixed", "not-applicable", met=False)], None),
        # A failing control makes the comparison inconclusive.
        ([UNFIXED, trial("identical", "control", "hang", met=False)], None),
        ([UNFIXED, trial("identical", "control", "inconclusive", met=False)], None),
        ([UNFIXED, trial("fused", "control", "not-applicable", met=False)], True),
        # Repeats that disagree.
        ([UNFIXED, trial("unfixed", "unfixed", "clean", met=False)], None),
        ([UNFIXED, UNFIXED], True),
        # Unfixed, and expected to be clean: nothing was reproduced.
        ([trial("unfixed", "unfixed", "clean")], False),
    ],
)
def test_conclusion_says_whether_the_failure_was_reproduced(
    trials: list[TrialResult], reproduced: bool | None
) -> None:
    assert conclude(trials).reproduced is reproduced


def test_every_symptom_must_be_reproduced() -> None:
    other = trial("unfixed-too", "unfixed", "crash")
    assert conclude([UNFIXED, other, CONTROL]).reproduced is True
    missed = trial("unfixed-too", "unfixed", "clean", met=False)
    assert conclude([UNFIXED, missed, CONTROL]).reproduced is None
    assert conclude([missed, CONTROL]).reproduced is False


@pytest.mark.parametrize(
    ("verdicts", "reproduced"),
    [(["wrong-gradients", "nonfinite"], True), (["wrong-gradients", "wrong-gradients"], False)],
)
def test_an_intermittent_failure_must_appear_in_one_repeat(
    verdicts: list[str], reproduced: bool
) -> None:
    trials = [
        replace(trial("unfixed", "unfixed", verdict), repeat=i, must_show="nonfinite")
        for i, verdict in enumerate(verdicts)
    ]
    assert conclude([*trials, CONTROL]).reproduced is reproduced


def test_only_a_clean_fix_is_correct() -> None:
    trials = [
        UNFIXED,
        trial("flag", "fix", "clean", ratio=1.02),
        trial("wrong", "fix", "wrong-gradients", ratio=1.0),
        trial("unsure", "fix", "inconclusive", ratio=1.0),
        trial("flaky", "fix", "clean", ratio=1.0),
        trial("flaky", "fix", "hang"),
    ]
    end = conclude(trials)
    assert [(f.variant, f.correct) for f in end.fixes] == [
        ("flag", True),
        ("wrong", False),
        ("unsure", False),
        ("flaky", False),
    ]
    assert end.cheapest_correct_fix == "flag"


def test_no_fix_is_judged_if_a_control_fails() -> None:
    broken = trial("identical", "control", "hang", met=False)
    end = conclude([UNFIXED, broken, trial("flag", "fix", "clean", ratio=1.0)])
    assert (end.fixes, end.cheapest_correct_fix) == ((), None)


@pytest.mark.parametrize(
    ("fixes", "cheapest"),
    [
        ([("a", 1.2, (1.1, 1.3)), ("b", 1.02, (1.0, 1.04))], "b"),
        # The smallest median, whatever overlaps.
        ([("a", 1.04, (1.01, 1.07)), ("b", 1.02, (0.99, 1.05))], "b"),
        ([("a", 1.84, (1.8, 1.9)), ("b", 1.05, (1.0, 1.1)), ("c", 1.02, (0.9, 1.06))], "c"),
        ([("a", 1.03, None), ("b", 1.02, None)], "b"),
        # Equal: the first listed.
        ([("a", 1.02, None), ("b", 1.02, None)], "a"),
        # A fix that was not timed cannot be the cheapest, not even the only correct one.
        ([("a", None, None), ("b", 1.5, None)], "b"),
        ([("a", None, None)], None),
        ([("a", None, None), ("b", None, None)], None),
        ([], None),
    ],
)
def test_the_cheapest_correct_fix_is_found(
    fixes: list[tuple[str, float | None, tuple[float, float] | None]], cheapest: str | None
) -> None:
    trials = [trial(v, "fix", "clean", ratio=r, spread=s) for v, r, s in fixes]
    assert conclude([UNFIXED, *trials]).cheapest_correct_fix == cheapest


def test_a_workaround_with_another_batch_is_never_the_cheapest_fix() -> None:
    workaround = replace(trial("same data", "fix", "clean", ratio=1.0), other_batch=True)
    assert conclude([UNFIXED, workaround]).cheapest_correct_fix is None
    assert conclude([UNFIXED, workaround]).fixes[0].correct
    both = [UNFIXED, workaround, trial("flag", "fix", "clean", ratio=1.2)]
    assert conclude(both).cheapest_correct_fix == "flag"


def test_one_undecided_trial_leaves_the_conclusion_open() -> None:
    hang = trial_result("unfixed", verdict="hang")
    assert conclude([hang, replace(hang, variant="other")]).reproduced is True
    open_ = trial_result("other", verdict="inconclusive")
    assert conclude([hang, open_]).reproduced is None
    assert conclude([open_]).reproduced is None
    none = trial_result("other", verdict="not-applicable")
    assert conclude([hang, none]).reproduced is True
    assert conclude([none]).reproduced is None
