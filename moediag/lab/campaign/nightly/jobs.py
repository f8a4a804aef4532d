"""The jobs of a night: each scenario on each track, once if several tracks request the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from packaging.utils import canonicalize_name

from moediag.errors import LayoutError, MoediagError
from moediag.lab.campaign.nightly.night import Job, Night
from moediag.lab.campaign.nightly.tracks import Track
from moediag.lab.campaign.sweep.session import ranks_for
from moediag.lab.scenario import catalogue
from moediag.lab.scenario import load as loading
from moediag.lab.scenario import plan as planning
from moediag.lab.scenario.plan import Plan
from moediag.lab.scenario.schema import Scenario
from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class Asked:
    """The command line."""

    scenarios: tuple[str, ...] = ()  # as typed, all of the catalogue if empty
    world_size: int | None = None  # None for each scenario's own
    device: str = "cpu"
    launcher: str = "auto"
    timeout: float | None = None
    torch: str = ""  # the installed one, to which every scenario is pinned

    @property
    def lane(self) -> str:
        return f"{self.device}-{self.world_size or 'own'}"


@dataclass(frozen=True, slots=True)
class Planned:
    """One launch for all of ``tracks``."""

    name: str  # scenario, as typed
    tracks: tuple[Track, ...]
    moved: Mapping[str, str]  # package -> version
    plan: Plan | None  # None if it cannot be planned
    problem: str = ""  # the reason

    @property
    def folder(self) -> str:
        return f"{self.tracks[0].name.replace('=', '-')}/{self.scenario}"

    @property
    def scenario(self) -> str:
        return self.plan.scenario.name if self.plan else self.name

    def jobs(self, finished: bool, seconds: float = 0.0, problem: str = "") -> tuple[Job, ...]:
        return tuple(Job(self.scenario, t.name, finished, seconds, problem) for t in self.tracks)


def plan_all(tracks: Sequence[Track], asked: Asked) -> list[Planned]:
    """Returns the launches of a night. Raises ScenarioError for a scenario that cannot be read."""
    found = []
    for name in asked.scenarios or catalogue.names():
        scenario = loading.load(catalogue.find(name))
        groups: dict[tuple[tuple[str, str], ...], list[Track]] = {}
        for track in tracks:
            moved = _moved(scenario, track, asked.torch)
            if moved is not None:
                groups.setdefault(tuple(sorted(moved.items())), []).append(track)
        found += [
            _planned(name, scenario, own, dict(moved), asked) for moved, own in groups.items()
        ]
    return found


def _moved(scenario: Scenario, track: Track, torch: str) -> dict[str, str] | None:
    """Returns what ``track`` changes: nothing if the scenario already pins that release; None if
    the scenario does not name the package. Every scenario runs on some torch."""
    if not track.package:
        return {}
    stack = {str(canonicalize_name(n)): v for n, v in scenario.stack.items()}
    pinned = stack.get(track.package, torch if track.package == "torch" else None)
    if pinned is None:
        return None
    return {} if pinned.split("+")[0] == track.version else {track.package: track.version}


def _planned(
    name: str, scenario: Scenario, tracks: Sequence[Track], moved: dict[str, str], asked: Asked
) -> Planned:
    own = tuple(tracks)
    try:
        ranks = ranks_for(scenario, asked.world_size, asked.device)
        if ranks is None:
            raise LayoutError(f"needs {scenario.world.min} ranks or more")
        # Step times are not comparable between nights.
        quick = scenario.model_copy(update={"cost": None})
        plan = planning.plan(
            quick,
            ranks,
            asked.device,
            variants=_variants(scenario, moved),
            launcher=asked.launcher,
            timeout=asked.timeout,
            stack_overrides=moved,
        )
    except MoediagError as error:
        return Planned(scenario.name, own, moved, None, error.message)
    return Planned(name, own, moved, plan)


def _variants(scenario: Scenario, moved: Mapping[str, str]) -> list[str]:
    """Returns the variants that a moved package affects: one with its own version would run as
    every night."""
    return [n for n, v in scenario.variants.items() if not set(moved) & set(v.stack)]


# ------------------------------------------------------------------------ order and time


def ordered(planned: Iterable[Planned], earlier: Sequence[Night]) -> list[Planned]:
    """Returns the jobs, the one with the oldest last result first, so that what did not fit last
    night runs; then pinned stacks before moved ones, grouped by stack."""
    return sorted(planned, key=lambda p: (_last(p, earlier), _order(p), _stack(p), p.name))


def _last(planned: Planned, earlier: Sequence[Night]) -> str:
    """Returns the night of its oldest track's newest result; "" for never."""
    names = {track.name for track in planned.tracks}
    newest = dict.fromkeys(names, "")
    for night in earlier:
        for job in night.jobs:
            if job.finished and job.scenario == planned.scenario and job.track in names:
                newest[job.track] = max(newest[job.track], night.started)
    return min(newest.values())


def _order(planned: Planned) -> int:
    return min(track.order for track in planned.tracks)


def _stack(planned: Planned) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(planned.plan.scenario.stack.items())) if planned.plan else ()


def seconds(planned: Planned, earlier: Sequence[Night]) -> float:
    """Returns how long it last ran (or until its time was up); 0.0 if unknown."""
    names = {track.name for track in planned.tracks}
    known = [
        (night.started, job.seconds)
        for night in earlier
        for job in night.jobs
        if job.scenario == planned.scenario and job.track in names and job.seconds
    ]
    return max(known, default=("", 0.0))[1]
