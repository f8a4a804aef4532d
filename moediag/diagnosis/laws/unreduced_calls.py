"""The lines of calls that leave out the reduction of gradients which a wrapper does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.large_calls import averaged
from moediag.diagnosis.laws.law import Broken, Findings, Suspicious, law, recorded
from moediag.diagnosis.numbers.law_breaches import Breach, law_facts
from moediag.diagnosis.numbers.law_splits import GRADIENTS
from moediag.result import Verdict
from moediag.result.wording import at_line


@law(Verdict.WRONG_GRADIENTS)
def last_backward_unreduced(facts: Facts) -> Findings:
    """A wrapper of a watched job reduced gradients of some backwards before an update, and not
    those of the last one."""
    lines = lines_of(facts, "late")
    # FSDP2 keeps gradients of the last backward that it did not reduce.
    keeps = any((True,) in own.rows("late", keeps=bool) for own in facts.of(recorded).values())
    # What a wrapper of replicas did not reduce makes them differ. A backward whose gradients the
    # program discards, as one for a perturbation of inputs, does not.
    found = facts.of(law_facts)
    equal = not keeps and found.checked and found.breach is None
    if lines and len(lines) == len(facts.of(recorded)) and not equal:
        text = (
            f"Before updates{at_line(lines[0])} the wrapper reduced the "
            "gradients of earlier backwards, and those of the last one were computed inside "
            "no_sync or with set_requires_gradient_sync(False): these are not in the update, or "
            "only each rank's own."
        )
        if facts.of(averaged):
            yield Suspicious(f"{text} The program also averages or sends values itself.")
            return
        yield Broken(
            text,
            pattern="last backward unreduced",
            next_step="Reduce in the last backward before each update, and only in that one.",
        )


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
    was inside no_sync; "late", of one before which the last call was; "bare", that called a wrapped
    model without its wrapper."""
    return [line for own in facts.of(recorded).values() for _, line in own.of(kind, line_of)[:1]]


def line_of(event: Mapping[str, Any]) -> tuple[str, str]:
    return str(event.get("model", "")), str(event.get("line") or "")
