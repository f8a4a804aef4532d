"""Repeats that follow from a measured rate: the closed form against integration and simulation."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moediag.lab.campaign.bisect.probe_verdict import (
    BAD,
    GOOD,
    Kind,
    ProbeVerdict,
    flaky,
    merged,
    other,
    skip,
)
from moediag.lab.campaign.bisect.search.rates import (
    MOST_REPEATS,
    STEADY_PRIOR,
    SURE,
    Rate,
    combined,
)
from moediag.protocol import build
from tests.depth import cases

RATES = st.integers(1, 30).flatmap(
    lambda trials: st.builds(Rate, st.integers(1, trials), st.just(trials))
)


def integrated(rate: Rate, clean: int, steps: int = 20_000) -> float:
    """The chance of missing it, averaged numerically over every rate the measurement allows."""
    hidden = rate.trials - rate.shown
    points = [(i + 0.5) / steps for i in range(steps)]
    weights = [p**rate.shown * (1 - p) ** hidden for p in points]
    missed = sum(w * (1 - p) ** clean for w, p in zip(weights, points, strict=True)) / steps
    uneven = sum(weights) / steps
    if not rate.steady:
        return missed / uneven
    always = STEADY_PRIOR * (clean == 0)
    return ((1 - STEADY_PRIOR) * missed + always) / ((1 - STEADY_PRIOR) * uneven + STEADY_PRIOR)


@pytest.mark.parametrize("trials", [1, 2, 5, 12])
def test_the_closed_form_equals_the_integral(trials: int) -> None:
    for shown in range(1, trials + 1):
        for clean in (0, 1, 2, 7):
            rate = Rate(shown, trials)
            assert rate.missed(clean) == pytest.approx(integrated(rate, clean), rel=1e-3)


@given(RATES)
def test_the_number_of_repeats_is_minimal(rate: Rate) -> None:
    assert [rate.missed(k + 1) <= rate.missed(k) for k in range(5)] == [True] * 5
    try:
        count = rate.repeats()
    except ValueError:
        assert rate.missed(MOST_REPEATS) > 1 - SURE
        return
    assert rate.missed(count) <= 1 - SURE
    assert count == 1 or rate.missed(count - 1) > 1 - SURE


def test_known_numbers_of_repeats_are_reproduced() -> None:
    known = {Rate(3, 3): 1, Rate(1, 1): 1, Rate(3, 5): 5, Rate(6, 12): 6}
    assert {rate: rate.repeats() for rate in known} == known


def test_simulated_confidence_is_as_stated() -> None:
    """Failures of every rate are calibrated with 12 trials; those that are bad look good in at most
    1 - SURE of the cases."""
    rng = random.Random(30)
    missed = total = 0
    for _ in range(cases(30_000)):
        p = rng.random()
        shown = sum(rng.random() < p for _ in range(12))
        if not 1 <= shown < 12:
            continue
        total += 1
        missed += all(rng.random() >= p for _ in range(Rate(shown, 12).repeats()))
    bound = (1 - SURE) * total
    assert missed <= bound + 3 * math.sqrt(bound), (missed, total)
    assert missed > bound / 20, "no more repeats than that takes"


@pytest.mark.parametrize(("shown", "trials"), [(0, 3), (4, 3), (0, 0), (-1, 1)])
def test_an_invalid_rate_is_refused(shown: int, trials: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Rate(shown, trials)


def test_a_failure_too_rare_to_bisect_is_refused() -> None:
    with pytest.raises(ValueError, match="shows in 1 of 500 trials needs more than 200"):
        Rate(1, 500).repeats()


# ------------------------------------------------------------------------ trials of a probe

ELSE = other("crash:OSError")
GONE = skip("it cannot be imported")


@pytest.mark.parametrize(
    ("trials", "rate", "kind"),
    [
        ([BAD], Rate(3, 3), Kind.BAD),
        ([GOOD], Rate(3, 3), Kind.GOOD),
        ([BAD, GOOD], Rate(3, 3), Kind.FLAKY),
        ([BAD, GOOD], Rate(3, 5), Kind.BAD),
        ([GOOD] * 4, Rate(3, 5), Kind.SKIP),  # five are needed
        ([GOOD] * 5, Rate(3, 5), Kind.GOOD),
        ([ELSE, GOOD], Rate(3, 3), Kind.GOOD),  # one clean trial is enough, and there is one
        ([ELSE, BAD], Rate(3, 3), Kind.BAD),
        ([ELSE, *[GOOD] * 4], Rate(3, 5), Kind.OTHER),  # an unrelated failure is no clean trial
        ([GONE, ELSE], Rate(3, 3), Kind.OTHER),
        ([GONE, GONE], Rate(3, 3), Kind.SKIP),
    ],
)
def test_verdicts_of_several_trials_are_combined(
    trials: list[ProbeVerdict], rate: Rate, kind: Kind
) -> None:
    assert combined(trials, rate).kind == kind
    assert combined(trials[::-1], rate).kind == kind


def test_a_probe_without_trials_is_refused() -> None:
    with pytest.raises(ValueError, match="without trials"):
        combined([], Rate())
    with pytest.raises(ValueError, match="no attempt"):
        merged([], True)


def test_a_clean_probe_counts_its_trials() -> None:
    assert combined([GOOD] * 7, Rate(3, 5)).trials == 7
    five = combined([GOOD] * 5, Rate(3, 5))
    assert merged([five, five], steady=False) == ProbeVerdict(Kind.GOOD, trials=10)


@pytest.mark.parametrize(
    ("attempts", "steady", "kind"),
    [
        ([BAD, GOOD], True, Kind.FLAKY),
        ([BAD, GOOD], False, Kind.BAD),
        ([GOOD, ELSE], True, Kind.GOOD),
        ([ELSE, BAD], True, Kind.BAD),
        ([flaky(1, 1), BAD], True, Kind.FLAKY),
        ([flaky(1, 1), GOOD], False, Kind.FLAKY),
        ([ELSE, GONE], True, Kind.SKIP),
    ],
)
def test_verdicts_of_several_probes_are_merged(
    attempts: list[ProbeVerdict], steady: bool, kind: Kind
) -> None:
    assert merged(attempts, steady).kind == kind


def test_a_flaky_verdict_includes_its_rate() -> None:
    assert merged([BAD, GOOD, GOOD], True).rate == pytest.approx(1 / 3)
    assert merged([flaky(1, 3), GOOD], True).text == "shows in 1 of 5 trials"


@given(st.sampled_from(Kind), st.text(max_size=5), st.none() | st.floats(0, 1), st.integers(0, 99))
def test_verdicts_round_trip_through_json(
    kind: Kind, text: str, rate: float | None, trials: int
) -> None:
    rate = None if rate is None else round(rate, 6)
    verdict = ProbeVerdict(kind, text, rate, trials)
    assert build(ProbeVerdict, verdict.to_json()) == verdict


@pytest.mark.parametrize(
    "raw",
    [None, [], {}, {"kind": "worse"}, {"kind": "bad", "rate": 2}, {"kind": "bad", "trials": "3"}],
)
def test_an_invalid_verdict_is_refused(raw: object) -> None:
    with pytest.raises(ValueError):
        build(ProbeVerdict, raw)
