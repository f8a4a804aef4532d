"""Draws the conclusion of a run: expectations met, failure reproduced, correct fixes.

A failure other than the expected one never counts as it. A control that fails makes the whole
comparison inconclusive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from moediag.lab.judgement import fix_effect
from moediag.result import (
    FAILURES,
    ClaimJudgement,
    Conclusion,
    Diagnosis,
    FixJudgement,
    Role,
    TrialResult,
    Verdict,
)


class Expectation(Protocol):
    """What a scenario expects of a variant."""

    @property
    def verdict(self) -> Any:
        """One verdict, several acceptable verdicts, or a mapping from backend to either."""

    @property
    def culprits(self) -> Sequence[int] | None:
        """The ranks that must be named; None if any are accepted."""

    @property
    def pattern(self) -> str | None:
        """A part that the signature must have; None if any is accepted."""


def met(expectation: Expectation | None, diagnosis: Diagnosis, backend: str) -> bool:
    """Whether the verdict is an expected one, the signature has the expected part and the culprits
    are exactly the expected ones (if given). Without an expectation the trial must be clean."""
    if expectation is None:
        return diagnosis.verdict == Verdict.CLEAN
    if diagnosis.verdict not in expected_verdicts(expectation, backend):
        return False
    culprits, pattern = expectation.culprits, expectation.pattern
    # These belong to failures: where a scenario also allows clean, nothing is named.
    if diagnosis.verdict not in FAILURES:
        return True
    if pattern is not None and pattern not in diagnosis.signature.split(":"):
        return False
    if culprits is None:
        return True
    return sorted(culprits) == sorted(diagnosis.culprits)


def expected_verdicts(expectation: Expectation, backend: str) -> tuple[str, ...]:
    """The verdicts expected on ``backend``. A mapping without that backend and ``default`` gives
    none, which no trial can meet."""
    wanted = expectation.verdict
    if isinstance(wanted, Mapping):
        wanted = wanted.get(backend, wanted.get("default", ()))
    if isinstance(wanted, str):
        return (str(wanted),)
    return tuple(str(verdict) for verdict in wanted)


def conclude(trials: Sequence[TrialResult]) -> Conclusion:
    """The conclusion from all trials of one run.

    ``reproduced`` is True when every unfixed trial failed as expected, False when none did, and
    None when a control failed, no unfixed trial was decided, or repeats or unfixed variants
    disagree. A variant that must show a verdict needs it in at least one repeat. With a failing
    control, no fix is judged either."""
    controls = [t for t in trials if t.role == Role.CONTROL]
    if any(not t.met and t.verdict != Verdict.NOT_APPLICABLE for t in controls):
        return Conclusion(reproduced=None)
    fixes = tuple(_fixes(trials))
    return Conclusion(_reproduced(trials), fixes, _cheapest(trials, fixes), tuple(_claims(trials)))


def _reproduced(trials: Sequence[TrialResult]) -> bool | None:
    undecided = (Verdict.INCONCLUSIVE, Verdict.NOT_APPLICABLE)
    unfixed = [t for t in trials if t.role == Role.UNFIXED]
    decided = [t for t in unfixed if t.verdict not in undecided]
    if not decided or any(t.verdict == Verdict.INCONCLUSIVE for t in unfixed):
        return None
    found = set()
    for variant in dict.fromkeys(t.variant for t in decided):
        own = [t for t in decided if t.variant == variant]
        if len({t.met for t in own}) > 1:
            return None
        shown = {t.verdict for t in own}
        fails = bool(shown & FAILURES) and all(t.must_show in ("", *shown) for t in own)
        found.add(own[0].met and fails)
    return found.pop() if len(found) == 1 else None


def _fixes(trials: Sequence[TrialResult]) -> Iterable[FixJudgement]:
    """Each fix once, in the order listed: correct only when every repeat is clean."""
    unfixed = [t for t in trials if t.role == Role.UNFIXED]
    fixes = [t for t in trials if t.role == Role.FIX]
    for variant in dict.fromkeys(t.variant for t in fixes):
        own = [t for t in fixes if t.variant == variant]
        correct = all(t.verdict == Verdict.CLEAN for t in own)
        ratio = next((t.step_time_ratio for t in own if t.step_time_ratio is not None), None)
        meant = [t for t in unfixed if own[0].repairs in ("", t.variant)]
        yield FixJudgement(variant, correct, ratio, *fix_effect.effect(own, meant))


def _claims(trials: Sequence[TrialResult]) -> Iterable[ClaimJudgement]:
    unfixed = [t for t in trials if t.role == Role.UNFIXED]
    for variant in dict.fromkeys(t.variant for t in unfixed):
        yield fix_effect.claim([t for t in unfixed if t.variant == variant])


def _cheapest(trials: Sequence[TrialResult], fixes: Sequence[FixJudgement]) -> str | None:
    """The correct fix with the smallest median ratio, each round paired with the unfixed step's;
    None where none was timed. A workaround that trains on another batch is correct for that batch,
    but does not answer the question."""
    other = {t.variant for t in trials if t.other_batch}
    timed = [
        (fix.step_time_ratio, fix.variant)
        for fix in fixes
        if fix.correct and fix.variant not in other and fix.step_time_ratio is not None
    ]
    return min(timed, key=lambda item: item[0])[1] if timed else None
