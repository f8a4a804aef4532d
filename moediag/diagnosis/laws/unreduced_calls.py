"""The lines of calls that leave out the reduction of gradients which a wrapper does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import recorded
from moediag.diagnosis.numbers.law_breaches import Breach
from moediag.diagnosis.numbers.law_splits import GRADIENTS


def why_unreduced(breach: Breach, facts: Facts) -> str:
    """Why gradients were not reduced, if that explains the breach; "" where something else, such as
    a learning rate, differed first."""
    other = breach.reason is not None and breach.reason.what != GRADIENTS
    if breach.parameters is None or breach.initial or breach.counts is not None or other:
        return ""
    lines, unreduced = list(filter(None, lines_of(facts, "bare"))), lines_of(facts, "unreduced")
    if not lines and unreduced:
        return (
            f"Before the update at {unreduced[0]} every call of DistributedDataParallel "
            "was inside no_sync, so no gradient was reduced."
        )
    if not lines:
        return ""
    return (
        f"The model inside DistributedDataParallel was called without it, at {lines[0]}: the "
        "backward of such a call reduces nothing."
    )


def lines_of(facts: Facts, kind: str) -> list[str]:
    """The lines, one for each rank: "unreduced", of an update before which every call of a wrapper
    was inside no_sync; "bare", that called a wrapped model without its wrapper."""
    return [line for own in facts.of(recorded).values() for _, line in own.of(kind, line_of)[:1]]


def line_of(event: Mapping[str, Any]) -> tuple[str, str]:
    return str(event.get("model", "")), str(event.get("line") or "")
