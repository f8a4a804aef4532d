"""What `--dry-run` prints of `run`, `matrix` and `nightly`: the trials, and which environments have
to be built for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

from moediag.errors import MoediagError
from moediag.lab.scenario.plan import Plan
from moediag.lab.stacks import environment
from moediag.records import dataclass
from moediag.report import stdout
from moediag.report.text_layout import columns
from moediag.result import wording


@dataclass(frozen=True, slots=True)
class DryTrial:
    """A trial that would run. ``scenario``: in a matrix with its family."""

    scenario: str
    trial: str
    ranks: int
    backend: str
    stack: Mapping[str, str]  # requested versions
    built: bool  # its environment exists


class Cache:
    """Which environments exist; each is looked up once."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, str], ...], bool] = {}

    def has(self, request: Mapping[str, str]) -> bool:
        key = tuple(sorted(request.items()))
        if key not in self._known:
            try:
                self._known[key] = environment.ready(request) is not None
            except MoediagError:
                self._known[key] = False
        return self._known[key]


def trials(plans: Iterable[Plan]) -> Iterator[DryTrial]:
    """Yields all trials in order. Starts no process, builds nothing and makes no query."""
    cache = Cache()
    for plan in plans:
        for one in plan.trials:
            trial = one.trial
            yield DryTrial(
                plan.scenario.name, trial.name, trial.world_size, trial.backend, one.stack,
                cache.has(one.stack),
            )  # fmt: skip


def show(found: Sequence[DryTrial], as_json: bool, problems: Sequence[str] = ()) -> None:
    """Prints the trials. ``problems``: what cannot run, and why."""
    if as_json:
        trials = [asdict(one) for one in found]
        stdout.data({"trials": trials, "cannot_run": list(problems)})
        return
    for line in (*(f"cannot run: {problem}" for problem in problems), *lines(found)):
        stdout.line(line)


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
