"""Decides whether a trial showed the target failure.

The failure is learned at the bad end: the signatures (:mod:`moediag.diagnosis.rules.signature`) of
its unfixed trials whose verdict the scenario declares. How much must match:

- ``exact``: the whole signature;
- ``class``: the verdict and what happened (kind and operations of the divergence, type of the
  exception), whatever the axis, the phase, the reason or the number of ranks;
- ``any``: any of the declared verdicts.

Another failure is OTHER, never GOOD: a new loud crash does not fix silent corruption. A release is
GOOD only if the unfixed trial *and* a control are clean. A failing control, a failing import and
trials that were not applicable or inconclusive say nothing about the release.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from moediag.errors import ExitCode, MoediagError
from moediag.lab.campaign.bisect.probe_verdict import Kind, ProbeVerdict, other, skip
from moediag.lab.campaign.bisect.search.rates import Rate, combined
from moediag.records import dataclass
from moediag.result import FAILURES, Role, TrialResult, Verdict
from moediag.result.verdicts import StrEnum

_IMPORTS = frozenset({"ImportError", "ModuleNotFoundError"})
_UNDECIDED = frozenset({Verdict.NOT_APPLICABLE, Verdict.INCONCLUSIVE})


class Match(StrEnum):
    EXACT = "exact"
    CLASS = "class"
    ANY = "any"


class CannotLearn(MoediagError):
    """The bad end does not show the failure that the scenario declares."""

    exit_code = ExitCode.INCONCLUSIVE


@dataclass(frozen=True, slots=True)
class Target:
    """What counts as the failure."""

    variant: str  # the unfixed variant that is probed
    declared: tuple[str, ...]  # verdicts that its expectation allows on this backend
    signatures: tuple[str, ...]  # as learned, the most frequent first
    match: Match = Match.EXACT
    rate: Rate = field(default_factory=Rate)  # how often it showed while it was learned

    @property
    def failures(self) -> frozenset[str]:
        """Returns the declared verdicts that are failures; a scenario may allow clean too."""
        return frozenset(self.declared) & {str(v) for v in FAILURES}

    def matches(self, signature: str) -> bool:
        if self.match == Match.ANY:
            learned = {_class(s)[0] for s in self.signatures}
            return _class(signature)[0] in self.failures | learned
        if self.match == Match.CLASS:
            return _class(signature) in {_class(s) for s in self.signatures}
        return signature in self.signatures


def learn(
    trials: Sequence[TrialResult],
    variant: str,
    declared: Sequence[str],
    match: Match = Match.EXACT,
    pattern: str | None = None,
) -> Target:
    """Learns the failure from the trials of the bad end. Ignores trials that were not applicable or
    inconclusive, and other failures if the declared one shows. ``pattern``: a required part of the
    signature. Raises CannotLearn with what showed instead."""
    wanted = {str(v) for v in FAILURES} & set(declared)
    own = [t for t in trials if t.variant == variant]
    decided = [t for t in own if t.verdict not in _UNDECIDED]
    failing = _failing_control(trials)
    if failing is not None:
        raise CannotLearn(
            f"the bad end proves nothing: {_control(failing)}",
            "Give another release with --bad.",
        )
    shown = [t for t in decided if t.verdict in wanted and _has(t.signature, pattern)]
    if not shown:
        seen = list(dict.fromkeys(t.signature for t in decided)) or [_why(t) for t in own[:1]]
        what = " or ".join(sorted(wanted)) or "any failure"
        what += f" with {pattern}" if pattern else ""
        raise CannotLearn(
            f"the bad end does not show {what} in variant {variant}: "
            + ("; ".join(seen) or "it has no trial"),
            "Give a release that has the failure with --bad.",
        )
    names = [t.signature for t in shown]
    signatures = sorted(set(names), key=lambda name: (-names.count(name), name))
    good_or_shown = len(shown) + sum(t.verdict == Verdict.CLEAN for t in decided)
    rate = Rate(len(shown), good_or_shown)
    return Target(variant, tuple(declared), tuple(signatures), match, rate)


def judge(trials: Sequence[TrialResult], target: Target) -> ProbeVerdict:
    """Returns the verdict of one probe from the trials of ``target.variant`` and its controls. A
    probe may omit the controls while the failure shows; without one it is never GOOD."""
    own = [t for t in trials if t.variant == target.variant]
    if not own:
        return skip(f"no trial of variant {target.variant}")
    failing = _failing_control(trials)
    if failing is not None:
        return skip(_control(failing))
    found = combined([_one(t, target) for t in own], target.rate)
    if found.kind == Kind.GOOD:
        controls = [t for t in trials if t.role == Role.CONTROL]
        if not any(t.verdict == Verdict.CLEAN for t in controls):
            seen = _control(controls[0]) if controls else "no control was run"
            return skip(f"clean, but {seen}")
    return found


def _one(trial: TrialResult, target: Target) -> ProbeVerdict:
    if trial.verdict in _UNDECIDED:
        return skip(_why(trial))
    if trial.verdict == Verdict.CLEAN:
        return ProbeVerdict(Kind.GOOD)
    if target.matches(trial.signature):
        return ProbeVerdict(Kind.BAD, trial.signature)
    if trial.verdict == Verdict.CRASH and _class(trial.signature)[1] in _IMPORTS:
        return skip(f"it cannot be imported: {trial.cause or trial.signature}")
    return other(trial.signature)


def _failing_control(trials: Sequence[TrialResult]) -> TrialResult | None:
    """Returns a control that failed; one that could not be judged is no failure."""
    controls = [t for t in trials if t.role == Role.CONTROL and t.verdict not in _UNDECIDED]
    return next((t for t in controls if t.verdict != Verdict.CLEAN), None)


def _control(trial: TrialResult) -> str:
    seen = _why(trial) if trial.verdict in _UNDECIDED else trial.signature
    return f"the control {trial.variant} is not clean ({seen})"


def _why(trial: TrialResult) -> str:
    return f"{trial.verdict}: {trial.cause}" if trial.cause else str(trial.verdict)


def _has(signature: str, pattern: str | None) -> bool:
    return pattern is None or pattern in signature.split(":")


def _class(signature: str) -> tuple[str, str]:
    """Returns (verdict, what happened). The latter is "" if the signature has none, and for the
    pattern of ranks, which is the last part."""
    verdict, *rest = signature.split(":")
    what = rest[0] if rest and not rest[0].endswith(("-rank", "-ranks")) else ""
    return verdict, what
