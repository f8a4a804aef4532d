"""Schedulers of the learning rate step once for each update, each of its own optimizer."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Findings, Suspicious, law, recorded
from moediag.evidence.law_model import RankLaws
from moediag.protocol import build
from moediag.records import dataclass
from moediag.result.wording import at_line

_ENOUGH = 3  # checked steps
_UNUSED = 2  # checked steps with another learning rate


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A scheduler at a checked step."""

    number: int
    """Counts the schedulers of the rank, from 0."""
    name: str
    """Its class."""
    line: str
    """The user's line of its first call, or ""."""
    calls: int
    """Calls of its step() since the optimizer's first update."""
    updates: int
    """Updates of its optimizer."""
    optimizer: int
    """Counts the optimizers of the rank, from 0; -1: it has never stepped, and others that do have
    its parameters, other learning rates and no scheduler."""
    optimizers: int
    """How many optimizers have stepped."""
    prepared: bool = False
    """accelerate steps it, once for each rank."""
    made: str = ""
    """The user's line that made it, or ""."""


_UNUSED_ONE, _IDLE, _STEPS = range(3)  # its optimizer does not step; only its optimizer does; both


def _by(field: str, own: RankLaws, kind: int = _STEPS) -> list[list[Scheduled]]:
    """The records of a rank of this kind that have the same value of a field."""
    rows: dict[int, list[Scheduled]] = defaultdict(list)
    for one in own.of("scheduled", functools.partial(build, Scheduled)):
        if (one.optimizer >= 0) + (one.optimizer >= 0 and one.calls > 0) == kind:
            rows[getattr(one, field)].append(one)
    return list(rows.values())


@law(suspects=True)
def schedulers_ahead(facts: Facts) -> Findings:
    """A scheduler of the learning rate steps several times for each update of its optimizer."""
    ranks = facts.of(recorded)
    for own in ranks.values():
        for of in _by("number", own):
            times = _times(of)
            if times > 1:
                if times == len(ranks) and of[-1].prepared and " and " not in of[-1].line:
                    yield (
                        f"accelerate steps a prepared {of[0].name} {times} times for each update"
                        f"{at_line(of[-1].line)}: its length must be the number of batches before "
                        "prepare divides them among the ranks."
                    )
                    return
                yield Suspicious(
                    f"{of[0].name}.step(){at_line(of[-1].line)} is called {times} times for each "
                    f"update of its optimizer: the learning rate follows its schedule {times} "
                    f"times as fast. Step it once for each update, not in each micro-batch."
                )
                return


@law(suspects=True)
def schedulers_misplaced(facts: Facts) -> Findings:
    """There are as many schedulers of one class as optimizers, and all of them change the learning
    rate of the same optimizer."""
    for own in facts.of(recorded).values():
        found = [of for of in _by("calls", own) if _misplaced(of)]
        if len(found) >= _ENOUGH:
            one = found[0][0]
            yield Suspicious(
                f"All {len(found[0])} schedulers of class {one.name} that step{at_line(one.line)} "
                f"change the learning rate of the same optimizer; the job has {one.optimizers} "
                "optimizers, and the others keep their learning rate."
            )
            return


@law(suspects=True)
def schedulers_unused(facts: Facts) -> Findings:
    """A scheduler or the program changes the learning rate of an optimizer that never steps, while
    another one updates the same parameters without a scheduler; or it never steps, while those of
    the same class do that other optimizers have."""
    for own in facts.of(recorded).values():
        used = {of[0].number for of in _by("number", own)}
        for of in _by("number", own, _UNUSED_ONE):
            if len(of) >= _UNUSED and of[0].number not in used:
                yield Suspicious(
                    f"{of[0].name}.step(){at_line(of[0].line)} changes the learning rate of an "
                    f"optimizer that never steps (the scheduler was made{at_line(of[0].made)}); "
                    "another one, made of the same parameters, steps with a learning rate that "
                    "does not follow the schedule. Make the scheduler with the optimizer that "
                    "steps."
                )
                return

        rows: dict[int, list[_Rates]] = defaultdict(list)
        for number, row in own.of("rates", _read_rates):
            rows[number].append(row)
        last = max((check.step for check in own.checks), default=0)
        for found in rows.values():
            # One that is set in advance may step later.
            changes = len({rates for _, rates, _ in found}) > 1
            if changes and len(found) >= _ENOUGH and found[-1][0] >= last:
                yield Suspicious(
                    f"The program changes the learning rate of {found[0][-1]}, which never steps; "
                    "another optimizer, made of the same parameters, steps with other learning "
                    "rates. An engine that is configured to make an optimizer does not use the "
                    "program's: set the learning rate in the one that steps."
                )
                return

        stepped = {of[-1].number: of[-1] for of in _by("number", own)}
        for one in (of[-1] for of in _by("number", own, _IDLE) if of[-1].number not in stepped):
            for other in stepped.values():
                alike = other.name == one.name and other.optimizer != one.optimizer
                if alike and other.calls >= _UNUSED and one.updates >= _ENOUGH:
                    yield Suspicious(
                        f"A {one.name}{at_line(one.made)} never steps, so its optimizer keeps its "
                        f"learning rate over {one.updates} updates; another one stepped "
                        f"{other.calls} times{at_line(other.line)}. Step both."
                    )
                    return


# Step, learning rates, and the optimizer in words.
_Rates = tuple[int, tuple[float, ...], str]


def _read_rates(event: Mapping[str, Any]) -> tuple[int, _Rates]:
    rates = tuple(map(float, event["rates"]))
    what = f"an optimizer of class {event['name']}{at_line(str(event['made']))}"
    return int(event["number"]), (int(event["step"]), rates, what)


def _misplaced(rows: list[Scheduled]) -> bool:
    """Whether these schedulers, stepped equally often, belong to one of several optimizers."""
    alike = len({(one.name, one.optimizer) for one in rows}) == 1
    return alike and len(rows) == rows[0].optimizers > 1


def _times(rows: list[Scheduled]) -> int:
    """The calls for each update, if these are about equally many between all checked steps (the
    last update of a pass may have fewer micro-batches); else 0."""
    found = [
        (after.calls - before.calls) / (after.updates - before.updates)
        for before, after in pairwise(rows)
        if after.updates > before.updates
    ]
    times = round(max(found, default=0))
    return times if len(rows) >= _ENOUGH and times - min(found, default=0) <= times / 10 else 0
