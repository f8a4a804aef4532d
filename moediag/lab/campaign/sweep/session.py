"""`moediag run --all`: every scenario of the catalogue, one after the other, one summary.

Each scenario is a separate run with its own run directory and journal. Runs share environments and
fork hosts: scenarios of the same release are adjacent, and its host imports once. An error in one
scenario affects only its own row.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import field
from datetime import datetime, timezone

import moediag
from moediag import hardware
from moediag.errors import ExitCode, LayoutError, MoediagError
from moediag.lab.campaign import run as runner
from moediag.lab.campaign.engine import Display, Header, Journal, Line, Records, Strategy, drive
from moediag.lab.campaign.sweep.shared_runs import Runs
from moediag.lab.campaign.sweep.summary import Sweep, SweepRow
from moediag.lab.scenario import catalogue
from moediag.lab.scenario import load as loading
from moediag.lab.scenario import plan as planning
from moediag.lab.scenario.plan import Plan
from moediag.lab.scenario.schema import Scenario
from moediag.launch.settings import LaunchOptions
from moediag.records import dataclass
from moediag.result import devices, wording


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """Options of all scenarios. ``world_size``: None for each scenario's own number of ranks; see
    :func:`ranks_for` for scenarios that cannot have the given one."""

    world_size: int | None = None
    device: str = "cpu"
    launcher: str = "auto"
    repeat: int = 1
    timeout: float | None = None
    stack: Mapping[str, str] = field(default_factory=dict)
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    timed: bool = True
    """Whether the fixes are timed."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A scenario and its plan. ``plan``: None if it cannot be planned; ``problem``: the reason."""

    name: str
    plan: Plan | None
    problem: str = ""

    @property
    def trials(self) -> int:
        return len(self.plan.trials) if self.plan else 0


def plan_all(options: SweepOptions, names: Sequence[str] | None = None) -> list[Planned]:
    """Returns every scenario of the catalogue (or ``names``), grouped by release."""
    found = [_planned(name, options) for name in names or catalogue.names()]
    return sorted(found, key=lambda p: (_stack(p.plan), p.name))


def ranks_for(scenario: Scenario, wanted: int | None, device: str) -> int | None:
    """Returns the number of ranks to run on if ``wanted`` are available: the largest valid one.
    If the scenario needs more: its minimum on a CPU, where ranks are just processes, and None on
    GPUs."""
    world = scenario.world
    if wanted is None:
        return world.default
    most = wanted if world.max is None else min(wanted, world.max)
    most -= most % world.multiple_of
    if most >= world.min:
        return most
    return None if device == "gpu" else world.default


def header(planned: Sequence[Planned], options: SweepOptions, command: Sequence[str]) -> Header:
    """Returns the question of a sweep."""
    return Header(
        "run --all",
        {
            "scenarios": [p.name for p in planned],
            "number of ranks": options.world_size,
            "device": options.device,
            "launcher": options.launcher,
            "repeats": options.repeat,
            "timeout": options.timeout,
            "stack": dict(options.stack),
            "quiescence": options.launch.quiescence,
        },
        {f"the scenario {p.name}": runner.digest(p.plan) for p in planned if p.plan is not None},
        {"started": datetime.now(timezone.utc).isoformat(timespec="seconds")},
        tuple(command),
    )


def sweep(
    planned: Sequence[Planned], options: SweepOptions, journal: Journal, display: Display
) -> Sweep:
    """Runs the scenarios that are not in ``journal``, below its folder, and writes the summary
    there after each.

    Raises Interrupted after Ctrl-C, and DiskFull; finished scenarios are in the summary."""
    with contextlib.closing(Runs(journal.folder, options.launch)) as runs:
        strategy = _Sweep(planned, options, journal, runs, display)
        drive(strategy, journal, display)
    return strategy.summary()


class _Sweep(Strategy[str, SweepRow]):
    """An item is the name of a scenario."""

    counted = False

    def __init__(
        self, planned: Sequence[Planned], options: SweepOptions, journal: Journal, runs: Runs,
        display: Display,
    ) -> None:  # fmt: skip
        self.planned = {p.name: p for p in planned}
        self.options = options
        self.folder = journal.folder
        self.started = str(journal.header.kept.get("started", ""))
        self.runs = runs
        self.display = display
        self.records = Records.of(journal, "scenario", SweepRow)
        self.rows = {name: self.records[name] for name in self.planned if name in self.records}
        self.before = sum(row.seconds for row in self.rows.values()) - time.monotonic()
        display.series("scenario", [p.trials for p in planned if p.plan is not None])
        for name, row in self.rows.items():
            display.skip(self.planned[name].trials, row.seconds)

    def wanted(self, most: int) -> list[str]:
        return [name for name in self.planned if name not in self.rows][:most]

    def name(self, item: str) -> str:
        return item

    def make(self, item: str) -> SweepRow:
        plan = self.planned[item].plan
        if plan is None:
            problem = self.planned[item].problem
            return SweepRow(item, exit_code=ExitCode.CANNOT_RUN_HERE, problem=problem)
        ran = self.runs.run(plan, self.folder / item, self.display)
        ranks = plan.trials[0].trial.world_size
        return SweepRow.of(item, ran.result, ran.exit_code, ran.problem, ran.seconds, ranks)

    def prepare(self, coming: Sequence[str]) -> None:
        for plan in (self.planned[name].plan for name in coming[:1]):
            if plan is not None:
                self.runs.prepare(plan)

    def keeps(self, value: SweepRow) -> bool:
        """Whether it is final: a row without a complete result is tried again."""
        return not value.problem

    def taken(self, item: str, value: SweepRow) -> None:
        self.rows[item] = value

    def line(self, value: SweepRow) -> Line:
        return Line(f"{value.scenario}: {value.status}")

    def done(self) -> str:
        return f"{len(self.rows)} of {wording.plural(len(self.planned), 'scenario')}"

    def write(self, incomplete: str) -> None:  # noqa: ARG002 - its rows show what is missing
        self.summary().write(self.folder)

    def summary(self) -> Sweep:
        shared = devices.DEVICES[self.options.device].shared
        return Sweep(
            started=self.started,
            moediag_version=moediag.__version__,
            machine=hardware.machine(),
            seconds=round(self.before + time.monotonic(), 1),
            planned=tuple(self.planned),
            rows=tuple(self.rows[name] for name in self.planned if name in self.rows),
            overrides=("--share-gpu",) if shared else (),
        )


def _planned(name: str, options: SweepOptions) -> Planned:
    try:
        scenario = loading.load(catalogue.find(name))
        ranks = ranks_for(scenario, options.world_size, options.device)
        if ranks is None:
            raise LayoutError(f"needs {scenario.world.min} ranks or more")
        plan = planning.plan(
            scenario,
            ranks,
            options.device,
            launcher=options.launcher,
            repeat=options.repeat,
            timeout=options.timeout,
            stack_overrides=options.stack,
            timed=options.timed,
        )
    except MoediagError as error:
        return Planned(name, None, error.message)
    return Planned(name, plan)


def _stack(plan: Plan | None) -> tuple[tuple[str, str], ...]:
    return () if plan is None else tuple(sorted(plan.scenario.stack.items()))
