"""Words used in results: verdicts, roles, confidence. Shared by diagnosis, plan and report."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from enum import StrEnum
else:  # pragma: no cover - Python 3.10
    from enum import Enum

    class StrEnum(str, Enum):
        def __str__(self) -> str:
            return str(self.value)


class Verdict(StrEnum):
    """What happened; docs/reference/verdicts.md explains each."""

    CLEAN = "clean"
    HANG = "hang"
    COLLECTIVE_MISMATCH = "collective-mismatch"
    WRONG_GRADIENTS = "wrong-gradients"
    WRONG_WEIGHTS = "wrong-weights"
    REPLICA_DIVERGENCE = "replica-divergence"
    NONFINITE = "nonfinite"
    WRONG_METRICS = "wrong-metrics"
    RESUME_DRIFT = "resume-drift"
    CRASH = "crash"
    NOT_APPLICABLE = "not-applicable"
    INCONCLUSIVE = "inconclusive"


FAILURES = frozenset(Verdict) - {Verdict.CLEAN, Verdict.NOT_APPLICABLE, Verdict.INCONCLUSIVE}
# Signature words for wrong weights that an optimizer update produced.
OF_UPDATE = WEIGHTS, RATE, UPDATES = "weights after the step", "learning rate", "updates"


class Role(StrEnum):
    """What a variant is for."""

    UNFIXED = "unfixed"
    FIX = "fix"
    CONTROL = "control"


class Effect(StrEnum):
    """What a fix does to the failure that it is meant for."""

    RIGHT = "right"
    WRONG = "wrong"
    NO_EFFECT = "no effect"
    WORSE = "makes it worse"


class Confidence(StrEnum):
    """How sure a verdict is; docs/reference/verdicts.md explains each."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"
