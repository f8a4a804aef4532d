"""Checks a relation between several ranks and one process: launches, diagnoses, confirms."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from moediag.lab.campaign.hunt.family_trials import FamilyTrials
from moediag.lab.campaign.hunt.layouts import LaunchedRelation, LaunchedWay
from moediag.launch.base import Launcher
from moediag.protocol import CONDITIONS, SIZES, RelationOutcome, SaveTask, Size, WayOutcome
from moediag.result import Diagnosis, Verdict

TWICE = "twice"
_KINDS = {Verdict.CRASH: "crash", Verdict.HANG: "hang", Verdict.COLLECTIVE_MISMATCH: "hang"}


def check(
    relation: LaunchedRelation, family: str, launcher: Launcher, folder: Path, timeout: float,
    listed: Callable[[WayOutcome], bool] = lambda _: False,
) -> RelationOutcome:  # fmt: skip
    """Returns the outcome of each way that applies. Evidence is left in ``folder``; what a way that
    holds left there is deleted. ``listed``: whether the register has this outcome; it then only
    has to show twice."""
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted hunt
    trials = FamilyTrials(relation, family, launcher, folder, timeout)
    trials.try_all()
    ways: list[WayOutcome] = []
    reasons: list[str] = []
    for way in relation.ways:
        outcome = _judge(trials, way, listed)
        if isinstance(outcome, str):
            reasons.append(outcome)
        else:
            ways.append(outcome)
    trials.clear()
    applicable = None if ways else "; ".join(dict.fromkeys(reasons))
    return RelationOutcome(family, relation.name, ways, applicable=applicable)


def check_way(
    relation: LaunchedRelation, name: str, size: Size, family: str, launcher: Launcher,
    folder: Path, timeout: float,
) -> RelationOutcome:  # fmt: skip
    """Returns the outcome of one way at one size, without the conditions."""
    shutil.rmtree(folder, ignore_errors=True)
    way = next(way for way in relation.ways if way.name == name)
    outcome = _outcome(
        way, FamilyTrials(relation, family, launcher, folder, timeout).run(way, 0, size)
    )
    shutil.rmtree(folder, ignore_errors=True)
    if isinstance(outcome, str):
        return RelationOutcome(family, relation.name, applicable=outcome)
    return RelationOutcome(family, relation.name, [outcome])


def _judge(
    trials: FamilyTrials, way: LaunchedWay, listed: Callable[[WayOutcome], bool]
) -> WayOutcome | str:
    """Returns the outcome, or why the way does not apply."""
    first = trials.run(way)
    outcome = _outcome(way, first)
    if isinstance(outcome, str) or outcome.holds is not False:
        return outcome
    known = listed(outcome)
    met: dict[str, bool | None] = dict.fromkeys(CONDITIONS) if known else {}
    for name in (TWICE,) if known else CONDITIONS:
        met[name] = _CHECKS[name](trials, way, first)
        if met[name] is False:
            break
    return dataclasses.replace(outcome, conditions=met)


def _outcome(way: LaunchedWay, first: Diagnosis) -> WayOutcome | str:
    """Returns the outcome without conditions, or why the way does not apply."""
    if first.verdict == Verdict.NOT_APPLICABLE:
        return f"{way.name}: {first.cause}"
    if first.verdict == Verdict.INCONCLUSIVE:
        return WayOutcome(way.name, None, text=first.cause)
    if first.verdict == Verdict.CLEAN:
        return WayOutcome(way.name, True, error=first.gradient_error)
    kind = _KINDS.get(first.verdict, "wrong")
    return WayOutcome(way.name, False, kind, first.signature, first.cause, first.gradient_error)


# ------------------------------------------------------------------------ conditions

_Check = Callable[[FamilyTrials, LaunchedWay, Diagnosis], "bool | None"]


def _control(trials: FamilyTrials, way: LaunchedWay, _first: Diagnosis) -> bool:
    return trials.run(_for(way, trials.relation.alone)).verdict == Verdict.CLEAN


def _again(trials: FamilyTrials, way: LaunchedWay, first: Diagnosis) -> bool:
    """The way showed the same beside others, or shows it in a second launch of its own."""
    name = way.trial(trials.family, 0, SIZES[0], 0.0).name
    together = trials.together.get(name)
    if together is not None and together.signature == first.signature:
        return True
    return trials.run(way, again=True).signature == first.signature


def _elsewhere(seed: int = 0, size: Size = SIZES[0]) -> _Check:
    """With another seed and another size at once, else with this change alone."""

    def check(trials: FamilyTrials, way: LaunchedWay, first: Diagnosis) -> bool:
        both = trials.run(way, 1, SIZES[1])
        if both.signature == first.signature:
            return True
        return trials.run(way, seed, size).signature == first.signature

    return check


def _second(trials: FamilyTrials, way: LaunchedWay, first: Diagnosis) -> bool | None:
    if first.verdict in (Verdict.WRONG_WEIGHTS, Verdict.CRASH):
        return None  # bytes decide; one rank ran
    batches = way.batches if way.batches in ("distinct", "repeated") else "identical"
    route = dataclasses.replace(trials.relation.route, batches=batches, clip=way.clip)
    return trials.run(_for(way, route)).verdict == Verdict.CLEAN


def _for(way: LaunchedWay, other: LaunchedWay) -> LaunchedWay:
    """Returns ``other`` with the loss of ``way``, and with its save."""
    task = way.task if isinstance(way.task, SaveTask) else other.task
    return dataclasses.replace(other, name=f"{other.name}-{way.name}", config=way.config, task=task)


_CHECKS: dict[str, _Check] = {
    "control": _control,
    TWICE: _again,
    "other-seed": _elsewhere(seed=1),
    "other-size": _elsewhere(size=SIZES[1]),
    # Gradients have a tolerance of a thousandth, which the control and the second route meet.
    "float64": lambda *_: None,
    "second-route": _second,
}
