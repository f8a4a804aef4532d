"""Gradients are added up in the precision that they have when the optimizer steps, and updates are
not lost in that of the parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.large_calls import elements
from moediag.diagnosis.laws.law import Findings, Suspicious, law, recorded
from moediag.evidence.law_model import LOCAL
from moediag.evidence.model import Evidence
from moediag.protocol.names import plain_name
from moediag.result.wording import counted, plural

_ENOUGH = 2  # steps
_MANY = 4  # micro-batches; with autocast the gradient of a single one has few digits
_FEW = 3  # matrices
_FLAT = 1 << 16  # elements of matrices that a wrapper keeps as one vector
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
    """Most elements of some matrices of 16 bits keep their value in the updates of an optimizer
    that does not add up elsewhere what is rounded away, although they have gradients."""
    for own in facts.of(recorded).values():
        # The weights of norms are near 1, where rounding is coarse.
        wide = {p.name for p in own.pieces if "x" in p.shape or elements(p.shape or "1") > _FLAT}
        rows = own.of("halves", _kept)
        times = Counter(name for _, _, lost in rows for name in lost)
        last, of_all, every = rows[-1] if rows else (0, 0, {})
        # The first updates of a warm-up are small.
        lost = {n: of for n, of in every.items() if n in wide and times[n] > _ENOUGH}
        kept, whole = (sum(of[at] for of in lost.values()) for at in (0, 1))
        if len(lost) >= _FEW or 2 * kept > of_all:
            yield Suspicious(
                f"In the update of step {last} and in earlier checked ones most elements with a "
                f"gradient kept their value in {counted(lost)} of 16 bits, there "
                f"{100 * kept / whole:.0f} % of them: the update is smaller than their rounding "
                "and is lost. Keep parameters of float32 for the optimizer.",
                tuple(lost),
            )
            return


def _kept(event: Mapping[str, Any]) -> tuple[int, int, dict[str, tuple[int, int]]]:
    """Step, elements, and of parameters of which most is lost how many were kept, and all."""
    kept, elements = list(map(int, event["kept"])), list(map(int, event["elements"]))
    rows = zip(event["names"], kept, elements, strict=True)
    lost = {plain_name(n): (one, of) for n, one, of in rows if 2 * one > of}
    return int(event["step"]), sum(elements), lost


def _reduced_in_low_precision(evidence: Evidence) -> bool:
    pieces = (p for own in recorded(evidence).values() for c in own.checks[:1] for p in c.pieces)
    calls = (call for seen in evidence.ranks.values() for call in seen.collectives)
    return any(p.how == LOCAL for p in pieces) or any(
        one in call.dtype for call in calls for one in _LOW
    )
