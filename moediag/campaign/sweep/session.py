"""`moediag run --all`: every scenario of the catalogue, one after the other, one summary.

Each scenario is a separate run with its own run directory and journal. Runs share environments and
fork hosts: scenarios of the same release are adjacent, and its host imports once. An error in one
scenario affects only its own row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import moediag
from moediag import hardware
from moediag.campaign import run as runner
from moediag.campaign.engine import Display, Header, Journal, Line, Records, Strategy, drive, opened
from moediag.campaign.engine.journal import JOURNAL_FILE
from moediag.campaign.sweep.summary import Row, Sweep
from moediag.errors import DiskFull, ExitCode, Interrupted, LayoutError, MoediagError
from moediag.launch.hosts import Hosts
from moediag.launch.settings import LaunchOptions
from moediag.pipeline.trials import TrialOptions
from moediag.report import page
from moediag.result import RunResult, wording
from moediag.scenario import catalogue, devices
from moediag.scenario import load as loading
from moediag.scenario import plan as planning
from moediag.scenario.plan import Plan
from moediag.scenario.schema import Scenario

HOSTS_FOLDER = "hosts"
TRACEBACK_FILE = "traceback.txt"


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
    with contextlib.closing(Hosts(journal.folder / HOSTS_FOLDER, options.launch)) as hosts:
        strategy = _Sweep(planned, options, journal, hosts, display)
        drive(strategy, journal, display)
    return strategy.summary()


class _Sweep(Strategy[str, Row]):
    """An item is the name of a scenario."""

    counted = False

    def __init__(
        self, planned: Sequence[Planned], options: SweepOptions, journal: Journal, hosts: Hosts,
        display: Display,
    ) -> None:  # fmt: skip
        self.planned = {p.name: p for p in planned}
        self.options = options
        self.folder = journal.folder
        self.started = str(journal.header.kept["started"])
        self.hosts = hosts
        self.display = display
        self.records = Records(journal, "scenario", Row.from_json, dataclasses.asdict)
        self.rows = {name: self.records[name] for name in self.planned if name in self.records}
        self.before = sum(row.seconds for row in self.rows.values()) - time.monotonic()
        display.series("scenario", [p.trials for p in planned if p.plan is not None])
        for name, row in self.rows.items():
            display.skip(self.planned[name].trials, row.seconds)

    def wanted(self, most: int) -> list[str]:
        return [name for name in self.planned if name not in self.rows][:most]

    def name(self, item: str) -> str:
        return item

    def make(self, item: str) -> Row:
        plan = self.planned[item].plan
        if plan is None:
            problem = self.planned[item].problem
            return Row(item, exit_code=ExitCode.CANNOT_RUN_HERE, problem=problem)
        ran = run_one(plan, self.folder / item, self.options.launch, self.hosts, self.display)
        ranks = plan.trials[0].trial.world_size
        return Row.of(item, ran.result, ran.exit_code, ran.problem, ran.seconds, ranks)

    def keeps(self, value: Row) -> bool:
        """Whether it is final: a row without a complete result is tried again."""
        return not value.problem

    def taken(self, item: str, value: Row) -> None:
        self.rows[item] = value
        self.write("")

    def line(self, value: Row) -> Line:
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


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run ended."""

    result: RunResult | None
    exit_code: int
    """The exit code of `moediag run` of this scenario alone."""
    problem: str
    """Why there is no result, or no complete one."""
    seconds: float


def run_one(plan: Plan, below: Path, launch: LaunchOptions, hosts: Hosts, display: Display) -> Ran:
    """Runs ``plan`` in the run directory ``below``, or resumes it there, and reports any outcome.
    Raises Interrupted, and DiskFull or OSError if the disk is full."""
    begun = time.monotonic()
    code, problem, result = int(ExitCode.OK), "", None
    try:
        resumed = (below / JOURNAL_FILE).exists()
        asked = runner.header(plan, launch)
        with opened(asked, below, resumed, plan.scenario.name) as journal:
            result = runner.run(plan, journal, TrialOptions(launch, hosts.launcher), display)
        code, problem = page.exit_code(result), result.incomplete
    except (Interrupted, DiskFull):
        raise
    except MoediagError as error:
        code, problem = error.exit_code, error.message
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # the next runs would fail the same way
        code = ExitCode.BUG
        problem = f"a bug in moediag: {type(error).__name__}: {error} ({TRACEBACK_FILE})"
        below.mkdir(parents=True, exist_ok=True)
        (below / TRACEBACK_FILE).write_text(traceback.format_exc(), encoding="utf-8")
    return Ran(result, code, problem, round(time.monotonic() - begun, 1))
