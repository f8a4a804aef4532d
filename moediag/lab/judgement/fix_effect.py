"""Judges the effect of a fix on the failure it is meant for: right, wrong, no effect, or worse.

A fix that fails at the same place as the unfixed code has no effect, even if the error text
differs. A fix that is silently wrong where the unfixed code raised makes it worse, because users no
longer notice the failure. Both are decided by comparing the results of the two trials, never by the
text of an error.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moediag.result import FAILURES, ClaimJudgement, Effect, TrialResult, Verdict
from moediag.result.verdicts import OF_UPDATE
from moediag.result.wording import error_size, plural

if TYPE_CHECKING:
    from moediag.lab.scenario.plan import Plan, PlannedTrial

# When a user notices it: at once, with a reason; by waiting; never.
LOUD, STUCK, SILENT = 1, 2, 3
_SEVERITY = {
    Verdict.CLEAN: 0,
    Verdict.CRASH: LOUD,
    Verdict.NONFINITE: LOUD,  # the loss or the norm in the log shows it
    Verdict.COLLECTIVE_MISMATCH: STUCK,  # gloo aborts; NCCL waits for its watchdog
    Verdict.HANG: STUCK,
    Verdict.WRONG_GRADIENTS: SILENT,
    Verdict.WRONG_WEIGHTS: SILENT,
    Verdict.REPLICA_DIVERGENCE: SILENT,
    Verdict.RESUME_DRIFT: SILENT,
    Verdict.WRONG_METRICS: SILENT,
}
_ALIKE = 0.01  # relative difference of two gradient errors that are called the same
_RANKS = ("no-rank", "one-rank", "several-ranks")
_CLASS = re.compile(r"^[A-Z]\w*$")
_DETECTORS = {
    Verdict.CRASH: "the exception",
    Verdict.NONFINITE: "nan or infinite numbers",
    Verdict.COLLECTIVE_MISMATCH: "schedules of the ranks side by side",
    Verdict.HANG: "ranks that wait in a collective without progress",
    Verdict.WRONG_GRADIENTS: "gradients against the reference",
    Verdict.WRONG_WEIGHTS: "weights against the checkpoint",
    Verdict.REPLICA_DIVERGENCE: "replicas side by side",
    Verdict.RESUME_DRIFT: "a resumed run against an uninterrupted one",
    Verdict.WRONG_METRICS: "reduced metrics side by side and against the reference",
}


def effect(fix: Sequence[TrialResult], unfixed: Sequence[TrialResult]) -> tuple[str, str]:
    """The effect of a fix and the reason; both empty where a trial was undecided.

    ``fix`` has all repeats of one fix; ``unfixed`` the trials of the failure it is meant for, or
    all unfixed trials where the fix names none. One repeat that makes it worse decides; repeats
    that fail in different ways are ``wrong``.
    """
    if any(_severity(t) is None for t in fix) or not fix:
        return "", ""
    known = [t for t in unfixed if _severity(t) is not None]
    each = [_one(t, known) for t in fix]
    words = [word for word, _ in each]
    if Effect.WORSE in words:
        return each[words.index(Effect.WORSE)]
    if len(set(words)) == 1:
        return each[0]
    return Effect.WRONG, next(why for word, why in each if word != Effect.RIGHT)


def claim(unfixed: Sequence[TrialResult]) -> ClaimJudgement:
    """Whether all repeats of one unfixed variant (at least one) reproduce the failure, or none
    does; None where repeats disagree or one was undecided. A variant that is expected to be clean,
    because the claim is a myth, does not reproduce it by being clean."""
    first = unfixed[0]
    if any(_severity(t) is None for t in unfixed):
        return ClaimJudgement(first.variant, None, first.cause)
    failed = {bool(_severity(t)) and t.met for t in unfixed}
    shown = not first.must_show or any(t.verdict == first.must_show for t in unfixed)
    if len(failed) > 1:
        return ClaimJudgement(first.variant, None, "repeats disagree")
    what = f"{first.verdict}, {extent(first)}" if _severity(first) else _ran(first)
    if _severity(first) and not first.met:
        what = f"another failure than the claimed one: {what}"
    return ClaimJudgement(first.variant, failed.pop() and shown, what)


def detector(t: TrialResult) -> str:
    """What detected the failure of ``t``; "" where it is clean."""
    if t.verdict == Verdict.WRONG_GRADIENTS:
        if "clipping norm" in t.signature.split(":"):
            return "the clipping norm against the reference"
        if not t.wrong_parameters:
            return "gradients of the blocks' inputs against the reference"
    if t.verdict == Verdict.WRONG_WEIGHTS and set(OF_UPDATE) & set(t.signature.split(":")):
        return "what the optimizer left against the reference"
    return _DETECTORS.get(Verdict(t.verdict), "")


def extent(t: TrialResult) -> str:
    """How much is wrong and what detected it: "12 of 69 gradients, largest error 3.0e-03, detected
    by gradients against the reference"."""
    pieces = []
    if t.wrong_parameters:
        compared = plural(t.parameters_compared, "gradient")
        pieces.append(f"{len(t.wrong_parameters)} of {compared}")
        pieces.append(f"largest error {error_size(t.gradient_error)}")
    pieces.append(f"detected by {detector(t)}")
    if t.verdict == Verdict.CRASH and _error(t):
        pieces[-1] += f", {' in '.join(_parts(t)[1:])}"
    return ", ".join(pieces)


def stage(t: TrialResult) -> tuple[str, ...]:
    """Where it failed: the verdict and the signature's parts, without the pattern of ranks and, if
    the place is known, without the exception's class."""
    parts = _parts(t)
    if t.verdict == Verdict.CRASH and len(parts) > 2 and _CLASS.match(parts[1]):
        del parts[1]
    return (str(t.verdict), *parts[1:])


def _parts(t: TrialResult) -> list[str]:
    return [part for part in t.signature.split(":") if part not in _RANKS]


def _error(t: TrialResult) -> str:
    """The class of the exception, or the signal; "" where it is not known."""
    return next(iter(_parts(t)[1:]), "")


def _severity(t: TrialResult) -> int | None:
    """How noticeable the failure is; None if undecided or if the question does not arise."""
    return _SEVERITY.get(Verdict(t.verdict))


def _one(t: TrialResult, unfixed: Sequence[TrialResult]) -> tuple[str, str]:
    own = _severity(t) or 0
    if not own:
        return Effect.RIGHT, ""
    if t.clean_without:
        return Effect.WORSE, f"{extent(t)}; the same run without it is clean ({t.clean_without})"
    same = next((u for u in unfixed if _same(t, u)), None)
    if same is not None:
        if t.verdict == Verdict.CRASH and t.cause != same.cause:
            was, now = _error(same), _error(t)
            changed = "the error's text" if was == now else f"the error, from {was} to {now},"
            return Effect.NO_EFFECT, f"fails at the same place: only {changed} changed"
        return Effect.NO_EFFECT, "the same failure as without it"
    if unfixed and all(own > (_severity(u) or 0) for u in unfixed):
        other = unfixed[0]
        how = {LOUD: "fails", STUCK: "hangs", SILENT: "silently wrong"}[own]
        return Effect.WORSE, f"{how} where the verdict without it is {other.verdict}: {extent(t)}"
    return Effect.WRONG, extent(t)


def _same(t: TrialResult, u: TrialResult) -> bool:
    """Whether both failed at the same stage; silent failures also equally large and in the same
    parameters."""
    if stage(t) != stage(u):
        return False
    if _SEVERITY[Verdict(t.verdict)] < SILENT:
        # Without a place or an operation two failures cannot be called the same.
        return len(stage(t)) > 1
    if set(t.wrong_parameters) != set(u.wrong_parameters):
        return False
    a, b = t.gradient_error, u.gradient_error
    if a is None or b is None:
        return a is b
    return abs(float(a) - float(b)) <= _ALIKE * max(abs(float(a)), abs(float(b)))


def _ran(t: TrialResult) -> str:
    text = f"{plural(t.world_size, 'rank')} ran to the end"
    if t.parameters_compared:
        text += f", {plural(t.parameters_compared, 'gradient')} match the reference (largest error"
        text += f" {error_size(t.gradient_error)})"
    return text


def with_regressions(plan: Plan, results: Sequence[TrialResult]) -> tuple[TrialResult, ...]:
    """``results`` with a note on each failing fix whose own run (same model, step, skew, wrapper
    and stack) was clean in another trial of this plan without a fix."""
    planned = {(p.trial.variant, p.repeat): p for p in plan.trials}
    clean = {
        _question(planned[key]): result.variant
        for result in results
        if (key := (result.variant, result.repeat)) in planned
        and planned[key].trial.fix is None
        and result.verdict == Verdict.CLEAN
    }
    return tuple(_noted(r, planned.get((r.variant, r.repeat)), clean) for r in results)


def _question(planned: PlannedTrial) -> tuple[object, ...]:
    """What identifies a run, apart from its fix."""
    trial = planned.trial
    stack = tuple(sorted(planned.stack.items()))
    how = (trial.model, trial.wrapper, trial.step, trial.skew, trial.task)
    return (planned.reference_key, *map(repr, how), stack)


def _noted(
    result: TrialResult, planned: PlannedTrial | None, clean: dict[tuple[object, ...], str]
) -> TrialResult:
    if planned is None or planned.trial.fix is None or result.verdict not in FAILURES:
        return result
    other = clean.get(_question(planned))
    if other is None:
        return result
    note = f"regresses: the same run without this fix is clean ({other})"
    return dataclasses.replace(result.diagnosed(notes=(*result.notes, note)), clean_without=other)
