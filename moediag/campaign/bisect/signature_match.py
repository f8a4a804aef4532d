"""Is what a trial showed the failure that is looked for?

The failure is learned at the bad end: the signatures (:mod:`moediag.diagnosis.rules.signature`) of
its unfixed trials, as far as their verdict is one that the scenario declares. How much must agree:

- ``exact``: the whole signature;
- ``class``: the verdict and what happened (kind and operations of the divergence, type of the
  exception), whatever the axis, the phase, the reason or how many ranks;
- ``any``: any of the declared verdicts.

Another failure is OTHER, never GOOD: "it crashes loudly now" is no repair of silent corruption. It
is GOOD only when the unfixed trial is clean *and* a control beside it is. A failing control, an
import that fails and whatever was not applicable or inconclusive say nothing about the release.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moediag.campaign.bisect.probe_verdict import Kind, ProbeVerdict, other, skip
from moediag.campaign.bisect.search.rates import Rate, combined
from moediag.errors import ExitCode, MoediagError
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
    """What counts as the failure. ``variant``: the unfixed variant that is probed; ``declared``:
    the verdicts that its expectation allows on this backend; ``signatures``: learned, the most
    frequent first; ``rate``: how often it showed while it was learned."""

    variant: str
    declared: tuple[str, ...]
    signatures: tuple[str, ...]
    match: Match = Match.EXACT
    rate: Rate = field(default_factory=Rate)

    @property
    def failures(self) -> frozenset[str]:
        """The declared verdicts that are failures: a scenario may allow clean as well."""
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
    """From the trials of the bad end. Trials that were not applicable or inconclusive do not
    count; where the declared failure and another one show, only the declared one is learned.
    ``pattern``: a part that its signature must have. Raises CannotLearn, saying what showed
    instead."""
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


def judge(trials: Sequence[TrialResult], target: Target, sure: float = 0.95) -> ProbeVerdict:
    """The verdict of one probe from the trials of its run: those of ``target.variant`` and the
    controls that belong to it. A probe may leave the controls away while the failure shows; it
    is never GOOD without one."""
    own = [t for t in trials if t.variant == target.variant]
    if not own:
        return skip(f"no trial of variant {target.variant}")
    failing = _failing_control(trials)
    if failing is not None:
        return skip(_control(failing))
    found = combined([_one(t, target) for t in own], target.rate, sure)
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
    """A control that failed; one that could not be judged is no failure yet."""
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
    """(verdict, what happened); the latter "" where the signature has none, and always for the
    pattern of ranks, which is the last part."""
    verdict, *rest = signature.split(":")
    what = rest[0] if rest and not rest[0].endswith(("-rank", "-ranks")) else ""
    return verdict, what
