"""A run that was judged, diagnosed again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moediag.evidence.model import Evidence
from moediag.result import RunResult, TrialResult, Verdict, wording

# A trial's scenario, its diagnosis without expectations, and the evidence.
Examined = tuple[str, TrialResult, Evidence]


def judged_again(
    result: RunResult, found: Mapping[str, Examined]
) -> tuple[RunResult, tuple[Evidence, ...]]:
    """Returns a judged run with its trials diagnosed again. Where that gives another answer, the
    trial is judged by it, and a note says so."""
    from moediag.lab import judgement

    trials = [_rejudged(trial, found) for trial in result.trials]
    same = all(n.diagnosis is o.diagnosis for n, o in zip(trials, result.trials, strict=True))
    conclusion = result.conclusion if same else judgement.conclude(trials)
    seen = [found[t.evidence][2] if t.evidence in found else Evidence(0, {}) for t in result.trials]
    return replace(result, trials=tuple(trials), conclusion=conclusion), tuple(seen)


def _rejudged(trial: TrialResult, found: Mapping[str, Examined]) -> TrialResult:
    if trial.evidence not in found:
        return trial
    _, new, _ = found[trial.evidence]
    same = (new.verdict, new.culprits) == (trial.verdict, trial.culprits)
    if same or new.verdict == Verdict.INCONCLUSIVE:  # perhaps its reference was deleted
        return replace(trial, evidence=new.evidence)
    named = f", culprit {wording.ranks(trial.culprits)}" if trial.culprits else ""
    note = f"the run itself found {trial.verdict}{named}"
    return replace(
        trial,
        diagnosis=replace(new.diagnosis, notes=(*new.notes, note)),
        met=str(new.verdict) in trial.expected.split(" or "),
        evidence=new.evidence,
    )
