"""What `run --dry-run` prints: the trials, and which environments have to be built for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moediag.errors import MoediagError
from moediag.report.text_layout import columns
from moediag.result import wording
from moediag.scenario.plan import Plan
from moediag.stacks import environment


@dataclass(frozen=True, slots=True)
class DryTrial:
    """A trial that would run."""

    scenario: str
    trial: str
    ranks: int
    backend: str
    stack: Mapping[str, str]  # requested versions
    built: bool  # its environment exists


def trials(plans: Iterable[Plan]) -> Iterator[DryTrial]:
    """Yields all trials in order. Starts no process, builds nothing and makes no query."""
    known: dict[tuple[tuple[str, str], ...], bool] = {}
    for plan in plans:
        for one in plan.trials:
            key = tuple(sorted(one.stack.items()))
            if key not in known:
                known[key] = _built(one.stack)
            trial = one.trial
            yield DryTrial(
                plan.scenario.name, trial.name, trial.world_size, trial.backend, one.stack,
                known[key],
            )  # fmt: skip


def lines(found: Sequence[DryTrial]) -> Iterator[str]:
    """Yields one line for each trial below its scenario, and how many environments are missing."""
    for scenario in dict.fromkeys(one.scenario for one in found):
        own = [one for one in found if one.scenario == scenario]
        where = f"{wording.plural(own[0].ranks, 'rank')}, {own[0].backend}"
        yield f"{scenario}: {wording.plural(len(own), 'trial')} on {where}"
        for name, stack in columns([(one.trial, _stack(one)) for one in own]):
            yield f"  {name}  {stack}"
    missing = {tuple(sorted(one.stack.items())) for one in found if not one.built}
    yield f"{wording.plural(len(missing), 'environment')} to build; nothing was run."


def _stack(one: DryTrial) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in one.stack.items())
    return versions + " (to be built)" * (not one.built)


def _built(request: Mapping[str, str]) -> bool:
    try:
        return environment.ready(request) is not None
    except MoediagError:
        return False
