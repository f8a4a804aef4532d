"""Step-time ratios of the cost trial: each fix against the healthy unfixed step, in rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moediag import protocol
from moediag.result import Role, TrialResult, Verdict

if TYPE_CHECKING:
    from moediag.lab.scenario.plan import Plan, PlannedTrial

UNFIXED, AGAIN = "", "again"  # keys of Outcome.cost


@dataclasses.dataclass(frozen=True, slots=True)
class Ratio:
    """(This step's time / the unfixed step's time): median and quartiles over the rounds, and
    each of them."""

    median: float
    quartiles: tuple[float, float]
    rounds: tuple[float, ...]


def ratios(seconds: dict[str, list[float]]) -> dict[str, Ratio]:
    """Ratios by step, from ``seconds`` (Outcome.cost of one rank). The unfixed step's ratio is 1,
    with the spread of its second timing: smaller differences are noise. Empty without at least two
    rounds."""
    import statistics

    unfixed = seconds.get(UNFIXED, [])
    found: dict[str, Ratio] = {}
    for name, rounds in seconds.items():
        pairs = [mine / base for mine, base in zip(rounds, unfixed, strict=False) if base > 0]
        if len(pairs) < 2:
            continue
        lower, _, upper = statistics.quantiles(pairs, n=4, method="inclusive")
        found[name] = Ratio(statistics.median(pairs), (lower, upper), tuple(pairs))
    if AGAIN in found:
        found[UNFIXED] = dataclasses.replace(found.pop(AGAIN), median=1.0)
    return found


def with_ratios(
    plan: Plan, results: Sequence[TrialResult], folder: Path
) -> tuple[TrialResult, ...]:
    """``results`` without the cost trial's own row, with its ratios where a trial ran the same code
    on the same stack. A cost trial does not check correctness: if it failed, the unfixed trial gets
    a note."""
    trial = next((p for p in plan.trials if isinstance(p.trial.task, protocol.CostTask)), None)
    if trial is None:
        return tuple(results)
    cost = trial.trial.variant
    own = next((r for r in results if r.variant == cost), None)
    others = tuple(r for r in results if r.variant != cost)
    try:
        outcome = protocol.Outcome.read(folder / trial.trial.name / protocol.outcome_file(0))
    except (OSError, ValueError):
        return others if own is None else tuple(_unmeasured(r, own) for r in others)
    measured = ratios(outcome.cost)
    planned = {(p.trial.variant, p.repeat): p for p in plan.trials}
    return tuple(_filled(r, planned.get((r.variant, r.repeat)), trial, measured) for r in others)


def _unmeasured(result: TrialResult, cost: TrialResult) -> TrialResult:
    if result.role != Role.UNFIXED:
        return result
    note = f"step times were not measured: {cost.verdict}. {cost.cause}".rstrip()
    return result.diagnosed(notes=(*result.notes, note))


def _filled(
    result: TrialResult,
    planned: PlannedTrial | None,
    trial: PlannedTrial,
    measured: dict[str, Ratio],
) -> TrialResult:
    if planned is None or planned is trial or planned.stack != trial.stack:
        return result
    if result.role == Role.CONTROL or result.verdict == Verdict.NOT_APPLICABLE:
        return result
    if planned.trial.fix is None and result.role != Role.UNFIXED:
        return result  # a fix of the data or the stack: not a different step on this stack
    ratio = measured.get(planned.trial.fix or UNFIXED)
    if ratio is None:
        return result
    spread = (round(ratio.quartiles[0], 3), round(ratio.quartiles[1], 3))
    rounds = tuple(round(one, 4) for one in ratio.rounds)
    return dataclasses.replace(
        result, step_time_ratio=round(ratio.median, 3), step_time_spread=spread,
        step_time_rounds=rounds,
    )  # fmt: skip
