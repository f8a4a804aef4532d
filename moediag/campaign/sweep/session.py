"""`moediag run --all`: every scenario of the catalogue, one after the other, one summary.

Each scenario is a run of its own with its own run directory. What they share are environments and
fork hosts: scenarios of the same release follow each other, and its host imports once. A scenario
that breaks costs its own row and nothing else.
"""

from __future__ import annotations

import errno
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import moediag
from moediag import doctor
from moediag.campaign.sweep.summary import Row, Sweep
from moediag.errors import ExitCode, Interrupted, LayoutError, MoediagError
from moediag.launch import signals
from moediag.launch.hosts import Hosts
from moediag.launch.settings import LaunchOptions
from moediag.pipeline import run as runner
from moediag.report import page
from moediag.report.progress import Observer
from moediag.result.run_result import RunResult
from moediag.scenario import catalogue, devices
from moediag.scenario import load as loading
from moediag.scenario import plan as planning
from moediag.scenario.plan import Plan
from moediag.scenario.schema import Scenario

HOSTS_FOLDER = "hosts"
TRACEBACK_FILE = "traceback.txt"


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """``world_size``: None is each scenario's own number of ranks; for one that cannot have the
    given number see :func:`ranks_for`."""

    world_size: int | None = None
    device: str = "cpu"
    launcher: str = "auto"
    repeat: int = 1
    timeout: float | None = None
    stack: Mapping[str, str] = field(default_factory=dict)
    launch: LaunchOptions = field(default_factory=LaunchOptions)


@dataclass(frozen=True, slots=True)
class Planned:
    """``plan``: None where the scenario cannot be planned, with ``problem``."""

    name: str
    plan: Plan | None
    problem: str = ""

    @property
    def trials(self) -> int:
        return len(self.plan.trials) if self.plan else 0


def plan_all(options: SweepOptions, names: Sequence[str] | None = None) -> list[Planned]:
    """Every scenario of the catalogue (or ``names``), those of one release next to each other."""
    found = [_planned(name, options) for name in names or catalogue.names()]
    return sorted(found, key=lambda p: (_stack(p.plan), p.name))


def ranks_for(scenario: Scenario, wanted: int | None, device: str) -> int | None:
    """The number of ranks it runs on where ``wanted`` are there: the largest that it can have. One
    that needs more gets the fewest that it needs on a CPU, where ranks are processes and no
    hardware, and None on GPUs."""
    world = scenario.world
    if wanted is None:
        return world.default
    most = wanted if world.max is None else min(wanted, world.max)
    most -= most % world.multiple_of
    if most >= world.min:
        return most
    return None if device == "gpu" else world.default


def sweep(planned: Sequence[Planned], options: SweepOptions, folder: Path,
          observer: Observer) -> Sweep:  # fmt: skip
    """Runs them all below ``folder`` and writes the summary there after each.

    Raises Interrupted after Ctrl-C, OSError when the disk is full: what was finished until then is
    in the summary."""
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    begun = time.monotonic()
    rows: list[Row] = []
    observer.series([p.trials for p in planned if p.plan is not None])

    def kept() -> Sweep:
        summary = Sweep(
            started=started,
            moediag_version=moediag.__version__,
            machine=doctor.machine(),
            seconds=round(time.monotonic() - begun, 1),
            planned=tuple(p.name for p in planned),
            rows=tuple(rows),
            overrides=("--share-gpu",) if devices.DEVICES[options.device].shared else (),
        )
        summary.write(folder)
        return summary

    hosts = Hosts(folder / HOSTS_FOLDER, options.launch)
    try:
        for one in planned:
            rows.append(_row(one, options, folder, hosts, observer))
            kept()
    except (KeyboardInterrupt, Interrupted) as error:
        with signals.held():
            kept()
        done = f"interrupted after {len(rows)} of {len(planned)} scenarios"
        raise Interrupted(
            f"{done}; evidence is in {folder}",
            "Nothing is left running. Environments that were built are kept.",
        ) from error
    finally:
        hosts.close()
    return kept()


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
        )
    except MoediagError as error:
        return Planned(name, None, error.message)
    return Planned(name, plan)


def _stack(plan: Plan | None) -> tuple[tuple[str, str], ...]:
    return () if plan is None else tuple(sorted(plan.scenario.stack.items()))


def _row(one: Planned, options: SweepOptions, folder: Path, hosts: Hosts,
         observer: Observer) -> Row:  # fmt: skip
    if one.plan is None:
        return Row(one.name, exit_code=ExitCode.CANNOT_RUN_HERE, problem=one.problem)
    ran = run_one(one.plan, folder / one.name, options.launch, hosts, observer)
    ranks = one.plan.trials[0].trial.world_size
    return Row.of(one.name, ran.result, ran.exit_code, ran.problem, ran.seconds, ranks)


@dataclass(frozen=True, slots=True)
class Ran:
    """``exit_code``: what `moediag run` of it alone would end with; ``problem``: why there is no
    result."""

    result: RunResult | None
    exit_code: int
    problem: str
    seconds: float


def run_one(plan: Plan, below: Path, launch: LaunchOptions, hosts: Hosts,
            observer: Observer) -> Ran:  # fmt: skip
    """Runs ``plan`` in the run directory ``below``, whatever becomes of it. Raises Interrupted, and
    OSError when the disk is full."""
    begun = time.monotonic()
    code, problem, result = int(ExitCode.OK), "", None
    try:
        own = runner.RunOptions(
            runner.run_folder(below, plan.scenario.name), launch, hosts.launcher
        )
        result = runner.run(plan, own, observer)
        code = page.exit_code(result)
    except Interrupted:
        raise
    except MoediagError as error:
        code, problem = error.exit_code, error.message
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # the next ones would fail alike
        code = ExitCode.BUG
        problem = f"a bug in moediag: {type(error).__name__}: {error} ({TRACEBACK_FILE})"
        (below / TRACEBACK_FILE).write_text(traceback.format_exc(), encoding="utf-8")
    return Ran(result, code, problem, round(time.monotonic() - begun, 1))
