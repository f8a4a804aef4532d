"""Trial results for tests, from the flat fields that result.json has."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from moediag.result import Confidence, Diagnosis, TrialResult, Verdict

OF_DIAGNOSIS = {field.name for field in fields(Diagnosis)}


def trial_result(variant: str = "unfixed", role: str = "unfixed", **changes: Any) -> TrialResult:
    """A trial of two ranks that was clean, with ``changes``: fields of it or of its diagnosis."""
    verdict = Verdict(changes.get("verdict", "clean"))
    clean = TrialResult(
        variant=variant, role=role, stack={}, launcher="fork", backend="gloo", world_size=2,
        diagnosis=Diagnosis(verdict, signature=str(verdict), confidence=Confidence.HIGH),
        expected=str(verdict), met=True,
    )  # fmt: skip
    return changed(clean, **changes)


def changed(trial: TrialResult, **changes: Any) -> TrialResult:
    """``trial`` with these fields of it or of its diagnosis."""
    found = {name: changes.pop(name) for name in [*changes] if name in OF_DIAGNOSIS}
    if "verdict" in found:
        found["verdict"] = Verdict(found["verdict"])
    if "confidence" in found:
        found["confidence"] = Confidence(found["confidence"])
    return replace(trial, diagnosis=replace(trial.diagnosis, **found), **changes)
