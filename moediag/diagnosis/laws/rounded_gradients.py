"""Gradients are added up in the precision that they have when the optimizer steps, and updates are
not lost in that of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Findings, Suspicious, law, recorded
from moediag.evidence.law_model import LOCAL
from moediag.evidence.model import Evidence
from moediag.protocol.names import plain_name
from moediag.result.wording import listed, plural

_ENOUGH = 2  # steps
_MANY = 4  # micro-batches; with autocast the gradient of a single one has few digits
_FEW = 3  # matrices
_MOST_KEPT = 0.5  # of the elements that have a gradient
_LOW = ("bfloat16", "float16", "half")


@law(suspects=True)
def gradients_rounded(facts: Facts) -> Findings:
    """Gradients of float32 that many micro-batches added to have the digits of bfloat16 only."""
    if _reduced_in_low_precision(facts.evidence):
        return
    for own in facts.of(recorded).values():
        # An update is that of the step after the one of which clearing was recorded.
        times = {(one.optimizer, one.step + 1): one.times for one in own.cleared}
        every = own.rows("rounded", optimizer=str, step=int, matrices=int, rounded=int)
        rows = [row for row in every if times.get(row[:2], 0) >= _MANY]
        wrong = [row for row in rows if row[2] == row[3] >= _FEW]
        if len(wrong) >= _ENOUGH and len(wrong) == len(rows):
            optimizer, step, matrices, _ = wrong[0]
            yield Suspicious(
                f"In step {step} and {plural(len(wrong) - 1, 'more step')}, "
                f"{times[optimizer, step]} micro-batches added to the gradients of {optimizer}, "
                f"and no element of its {matrices} matrices of float32 has more digits than "
                "bfloat16: they were added up in bfloat16, where a small gradient is lost beside a "
                "large sum. Add them up in float32."
            )
            return


@law(suspects=True)
def updates_rounded(facts: Facts) -> Findings:
    """Most elements of parameters of 16 bits keep their value in the updates of torch's optimizers,
    although they have gradients."""
    for own in facts.of(recorded).values():
        rows = own.of("halves", _kept)
        steps = {step for step, _, kept, elements in rows if kept > _MOST_KEPT * elements > 0}
        # The first updates of a warm-up are small.
        if len(steps) >= _ENOUGH + 1 and rows[-1][0] in steps:
            step, names, kept, elements = rows[-1]
            yield Suspicious(
                f"In the update of step {step} and in {len(steps) - 1} earlier checked ones, "
                f"{100 * kept / elements:.0f} % of the elements with a gradient kept their value "
                f"in parameters of 16 bits ({listed(names)}): the update is smaller than their "
                "rounding and is lost. Keep parameters of float32 for the optimizer.",
                names,
            )
            return


def _kept(event: Mapping[str, Any]) -> tuple[int, tuple[str, ...], int, int]:
    """Step, parameters of which most is lost, and over all: elements that were kept, and all."""
    kept, elements = list(map(int, event["kept"])), list(map(int, event["elements"]))
    rows = zip(event["names"], kept, elements, strict=True)
    names = tuple(plain_name(name) for name, one, of in rows if one > _MOST_KEPT * of)
    return int(event["step"]), names, sum(kept), sum(elements)


def _reduced_in_low_precision(evidence: Evidence) -> bool:
    pieces = (p for own in recorded(evidence).values() for c in own.checks[:1] for p in c.pieces)
    calls = (call for seen in evidence.ranks.values() for call in seen.collectives)
    return any(p.how == LOCAL for p in pieces) or any(
        one in call.dtype for call in calls for one in _LOW
    )
