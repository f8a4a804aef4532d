"""Losses that have a mean over samples, and the factor by which the gradients of ranks or of
micro-batches are added up."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Findings, Suspicious, recorded
from moediag.diagnosis.numbers import agreement
from moediag.diagnosis.numbers.reduced_gradients import REDUCTIONS, reductions
from moediag.evidence.law_model import REDUCED
from moediag.evidence.model import Evidence
from moediag.result.wording import at_line, few

_ENOUGH = 2  # steps
_NEAR = 0.02  # of factors
_CLOSE = 1e-3  # of weights that are meant to be equal
_DIVISOR = 16  # the largest one that may be a wrong number of ranks
_MANY = 64  # elements that are no numbers for a log
# Optimizers whose updates do not depend on the size of gradients.
_NORMALIZES = re.compile(r"adam|lamb|lion|rmsprop|adafactor|sophia|muon", re.IGNORECASE)


def means_added(facts: Facts) -> Findings:
    """Whether a job adds up gradients of losses that contain the mean over a rank's samples, as it
    is, and divides the sum by another number than that of its ranks. A loss that ranks compute
    together may be a sum of parts."""
    steps, number = defaultdict[int, list[int]](list), facts.evidence.world_size
    means = [row for own in facts.of(recorded).values() for row in own.of("losses", _means)]
    for one in facts.of(reductions):
        clip = facts.of(clip_factors).get(one.step, 1.0)
        events = [of for step, of in means if step == one.step]
        alone = len(events) == number and all(len(of) == 1 for of in events)
        whole = alone and all(any(abs(abs(w) - 1) < _CLOSE for w in of[0]) for of in events)
        by = clip / one.factor if whole and one.factor > 0 else 0.0
        if 1 <= round(by) <= _DIVISOR and abs(by / round(by) - 1) <= _NEAR:
            steps[round(by)].append(one.step)
    (by, found), *others = steps.items() if steps else [(number, [])]
    together = any(
        call.op not in REDUCTIONS + ("broadcast",) or call.phase == "forward"
        for seen in facts.evidence.ranks.values()
        for call in seen.collectives
        if call.step in found and "float" in call.dtype and call.numel_in >= _MANY
    )
    scaled = not {*found} <= facts.of(unscaled_steps)
    if len(found) < _ENOUGH or others or together or by == number or (by > 1 and scaled):
        return
    divided = "divided neither before nor after it" if by == 1 else f"divided by {by}"
    yield Suspicious(
        f"In steps {few(found)} the gradients are added up over the ranks and {divided}, and each "
        f"loss has a mean over the rank's own samples: with {number} ranks, the update is "
        f"{number / by:.3g} times that of the mean over all samples. Divide the sum or the loss by "
        "the number of ranks, once."
    )


def micro_batches_added(facts: Facts) -> Findings:
    """Whether all micro-batches of an update have a mean as it is in their losses. They are no
    tasks that are added up, if a wrapper reduces the gradients of the last one only. Some programs
    leave the factor to an optimizer that divides by the size of gradients: then it is a note."""
    found: dict[int, list[tuple[int, int]]] = {}
    for rank, own in facts.of(recorded).items():
        calls = dict(own.rows("unsynced", step=int, calls=list))
        clips = Counter(norm.step for norm in own.norms)
        rows = (
            (step, n)
            for step, n, changed in own.of("losses", _accumulated)
            if n and 0 <= changed <= clips[step] and step in facts.of(unscaled_steps)
        )
        found[rank] = [(s, n) for s, n in rows if calls.get(s) == [*(n - 1) * [False], True]]
    steps = agreement.together(found)
    if len(steps) >= _ENOUGH and facts.of(averaged_by_wrapper):
        number = next(iter(next(iter(steps.values())).values()))
        text = (
            f"In steps {few(steps)} each update has {number} micro-batches, of which the wrapper "
            "reduces the last one, and the loss of each has a mean that is not divided by their "
            f"number: the gradients are {number} times those of the mean over all samples. Divide "
            "each loss by the number of micro-batches."
        )
        every = facts.of(recorded).values()
        normalizes = all(_NORMALIZES.search(c.optimizer) for own in every for c in own.checks)
        yield text if normalizes and not any(own.norms for own in every) else Suspicious(text)


def scales_kept(facts: Facts) -> Findings:
    """Whether updates use the gradients of a loss that a scaler multiplied as they are."""
    for own in facts.of(recorded).values():
        rows = own.of("undivided", lambda of: (int(of["step"]), float(of["scale"]), of["line"]))
        if len({step for step, *_ in rows}) > _ENOUGH:
            step, scale, line = rows[0]
            yield Suspicious(
                f"GradScaler.scale multiplied the loss of step {step} by {scale:g}, and the "
                f"optimizer stepped{at_line(line)} without the scaler: nothing divided the "
                f"gradients, so they are {scale:g} times as large, and an update of gradients that "
                "overflow is not left out. Call scaler.step(optimizer) and scaler.update()."
            )
            return


def _accumulated(event: Mapping[str, Any]) -> tuple[int, int, int]:
    """The step, how many backwards of it have the same weights of means, 1 among them, and how
    often a gradient was changed after the last one; 0 backwards where they are not alike."""
    step, means = _means(event)
    each = [sorted(round(abs(weight), 3) for weight in of) for of in means]
    alike = len(each) > 1 and 1.0 in each[0] and all(of == each[0] for of in each)
    alike = alike and all(one["added"] for one in event["backwards"][1:])  # unlike those of SAM
    return step, len(each) if alike else 0, int(event["changed"])


def _means(event: Mapping[str, Any]) -> tuple[int, list[list[float]]]:
    return int(event["step"]), [[float(w) for w in one["means"]] for one in event["backwards"]]


def unscaled_steps(evidence: Evidence) -> set[int]:
    """Steps whose gradients no GradScaler multiplies."""
    checks = [check for own in recorded(evidence).values() for check in own.checks]
    scaled = {check.step for check in checks if check.scaled}
    return {check.step for check in checks} - scaled


def averaged_by_wrapper(evidence: Evidence) -> bool:
    """Whether DistributedDataParallel takes the mean of all gradients over all ranks."""
    world = evidence.world_size
    pieces = [piece for own in recorded(evidence).values() for piece in own.pieces]
    whole = ((p.how, len(p.ranks), p.part) == (REDUCED, world, "") for p in pieces)
    return bool(pieces) and all(whole)


def clip_factors(evidence: Evidence) -> dict[int, float]:
    """What clipping multiplied the gradients of a step by; 0.0 where that is not one number."""
    found: dict[int, set[float]] = defaultdict(set)
    for own in recorded(evidence).values():
        for norm in own.norms:
            found[norm.step].add(round(norm.factor, 6))
    return {step: factors.pop() if len(factors) == 1 else 0.0 for step, factors in found.items()}
