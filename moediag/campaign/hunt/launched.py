"""Checks a relation between several ranks and one process: launches, diagnoses, confirms."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from moediag.campaign.hunt.layouts import LaunchedRelation, LaunchedWay
from moediag.diagnosis import diagnose
from moediag.evidence.trial_folder import read_trial
from moediag.launch.base import Launcher
from moediag.launch.record import LaunchRecord
from moediag.pipeline.trials import last_line
from moediag.protocol import (
    CONDITIONS,
    SIZES,
    GenerateTask,
    Outcome,
    ReferenceTask,
    RelationOutcome,
    Size,
    Trial,
    WayOutcome,
    outcome_file,
    output_file,
)
from moediag.result import Confidence, Diagnosis, Verdict

_KINDS = {Verdict.CRASH: "crash", Verdict.HANG: "hang", Verdict.COLLECTIVE_MISMATCH: "hang"}
_REFERENCES = "references"
LOGITS = 1e-3  # allowed difference of generated tokens' logits, as a share of the largest


def check(
    relation: LaunchedRelation, family: str, launcher: Launcher, folder: Path, timeout: float
) -> RelationOutcome:
    """Returns the outcome of each way that applies. Evidence is left in ``folder``; what a way that
    holds left there is deleted."""
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted hunt
    trials = _Trials(relation, family, launcher, folder, timeout)
    ways: list[WayOutcome] = []
    reasons: list[str] = []
    for way in relation.ways:
        outcome = _judge(trials, way)
        if isinstance(outcome, str):
            reasons.append(outcome)
        else:
            ways.append(outcome)
    shutil.rmtree(folder / _REFERENCES, ignore_errors=True)
    applicable = None if ways else "; ".join(dict.fromkeys(reasons))
    return RelationOutcome(family, relation.name, ways, applicable=applicable)


def check_way(
    relation: LaunchedRelation, name: str, size: Size, family: str, launcher: Launcher,
    folder: Path, timeout: float,
) -> RelationOutcome:  # fmt: skip
    """Returns the outcome of one way at one size, without the conditions."""
    shutil.rmtree(folder, ignore_errors=True)
    way = next(way for way in relation.ways if way.name == name)
    outcome = _outcome(way, _Trials(relation, family, launcher, folder, timeout).run(way, 0, size))
    shutil.rmtree(folder, ignore_errors=True)
    if isinstance(outcome, str):
        return RelationOutcome(family, relation.name, applicable=outcome)
    return RelationOutcome(family, relation.name, [outcome])


def _judge(trials: _Trials, way: LaunchedWay) -> WayOutcome | str:
    """Returns the outcome, or why the way does not apply."""
    first = trials.run(way)
    outcome = _outcome(way, first)
    if isinstance(outcome, str) or outcome.holds is not False:
        return outcome
    met: dict[str, bool | None] = {}
    for name in CONDITIONS:
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


class _Trials:
    """Runs each trial of one family once, beside the references that they share."""

    def __init__(
        self, relation: LaunchedRelation, family: str, launcher: Launcher, folder: Path,
        timeout: float,
    ) -> None:  # fmt: skip
        self.relation = relation
        self._family = family
        self._launcher = launcher
        self._folder = folder
        self._timeout = timeout
        self._references: dict[str, tuple[Path, Diagnosis | None]] = {}
        self._known: dict[str, Diagnosis] = {}

    def run(
        self, way: LaunchedWay, seed: int = 0, size: Size = SIZES[0], again: bool = False
    ) -> Diagnosis:
        """``again``: the trial is run although its result is known."""
        trial = way.trial(self._family, seed, size, self._timeout)
        if trial.name in self._known and not again:
            return self._known[trial.name]
        path, refused = self._reference(trial)
        if refused is not None:
            return refused
        folder = self._folder / (f"{trial.name}-again" if again else trial.name)
        self._launcher.run(dataclasses.replace(trial, reference_path=str(path)), folder)
        found = diagnose(read_trial(folder))
        if isinstance(trial.task, GenerateTask) and found.verdict == Verdict.INCONCLUSIVE:
            found = _generated(folder, trial.world_size, found)
        if found.verdict in (Verdict.CLEAN, Verdict.NOT_APPLICABLE):
            shutil.rmtree(folder, ignore_errors=True)
        self._known[trial.name] = found
        return found

    def _reference(self, trial: Trial) -> tuple[Path, Diagnosis | None]:
        """Returns the file of the single process, and the result of every trial that needs it if
        there is none. Ranks that share a batch, for whatever reason, share a reference."""
        shared = trial.skew.batches
        shared = "identical" if shared == "per-replica" else shared
        key = repr((trial.world_size, shared, trial.step, trial.model))  # they hold dicts
        if key not in self._references:
            name = f"reference-{len(self._references)}"
            folder = self._folder / _REFERENCES / name
            path = folder.with_suffix(".pt")
            folder.parent.mkdir(parents=True, exist_ok=True)
            alone = dataclasses.replace(
                trial, name=name, task=ReferenceTask(), record=False, reference_path=str(path)
            )
            record = self._launcher.run(alone, folder)
            self._references[key] = path, _refused(record, folder)
        return self._references[key]


def _refused(record: LaunchRecord, folder: Path) -> Diagnosis | None:
    """Returns what a reference that was not computed says of every trial."""
    try:
        reason = Outcome.read(folder / outcome_file(0)).applicable
    except (OSError, ValueError):
        said = record.launch_error or last_line(folder / output_file(0)) or "it left no output"
        return _undiagnosed(Verdict.INCONCLUSIVE, f"the single-process reference failed: {said}")
    return None if reason is None else _undiagnosed(Verdict.NOT_APPLICABLE, reason)


def _generated(folder: Path, ranks: int, found: Diagnosis) -> Diagnosis:
    """Returns what the tokens of all ranks show; ``found`` if one wrote none."""
    try:
        outcomes = [Outcome.read(folder / outcome_file(rank)) for rank in range(ranks)]
    except (OSError, ValueError):
        return found
    if not all(one.tokens and one.reference_tokens for one in outcomes):
        return found
    apart = [one for one in outcomes if one.tokens != one.reference_tokens]
    # Rounding is about a hundredth of this; nan is no less.
    wrong = apart or [one for one in outcomes if not (one.logit_error or 0.0) <= LOGITS]
    if not wrong:
        return Diagnosis(Verdict.CLEAN, str(Verdict.CLEAN), Confidence.HIGH)
    cause = "; ".join(
        f"rank {one.rank} generated {' '.join(map(str, one.tokens))}, one process "
        f"{' '.join(map(str, one.reference_tokens))}, with logits that differ by "
        f"{one.logit_error or 0.0:.2g} of the largest"
        for one in wrong
    )
    return Diagnosis(Verdict.WRONG_METRICS, "wrong-tokens", Confidence.HIGH, cause=cause)


def _undiagnosed(verdict: Verdict, cause: str) -> Diagnosis:
    return Diagnosis(verdict, str(verdict), Confidence.HIGH, cause=cause)


# ------------------------------------------------------------------------ conditions

_Check = Callable[[_Trials, LaunchedWay, Diagnosis], "bool | None"]


def _control(trials: _Trials, way: LaunchedWay, _first: Diagnosis) -> bool:
    return trials.run(_for(way, trials.relation.alone)).verdict == Verdict.CLEAN


def _again(seed: int = 0, size: Size = SIZES[0]) -> _Check:
    def check(trials: _Trials, way: LaunchedWay, first: Diagnosis) -> bool:
        again = seed == 0 and size == SIZES[0]
        return trials.run(way, seed, size, again=again).signature == first.signature

    return check


def _second(trials: _Trials, way: LaunchedWay, first: Diagnosis) -> bool | None:
    if first.verdict in (Verdict.WRONG_WEIGHTS, Verdict.CRASH):
        return None  # bytes decide; one rank ran
    batches = way.batches if way.batches in ("distinct", "repeated") else "identical"
    route = dataclasses.replace(trials.relation.route, batches=batches, clip=way.clip)
    return trials.run(_for(way, route)).verdict == Verdict.CLEAN


def _for(way: LaunchedWay, other: LaunchedWay) -> LaunchedWay:
    """Returns ``other`` with the loss of ``way``."""
    return dataclasses.replace(other, name=f"{other.name}-{way.name}", config=way.config)


_CHECKS: dict[str, _Check] = {
    "control": _control,
    "twice": _again(),
    "other-seed": _again(seed=1),
    "other-size": _again(size=SIZES[1]),
    # Gradients have a tolerance of a thousandth, which the control and the second route meet.
    "float64": lambda *_: None,
    "second-route": _second,
}
