"""Complete runs of several scenarios, which share fork hosts."""

from __future__ import annotations

import contextlib
import time
import traceback
from pathlib import Path

from moediag.errors import DiskFull, ExitCode, Interrupted, MoediagError, disk_trouble
from moediag.lab.campaign import run as runner
from moediag.lab.campaign.engine import Display, opened
from moediag.lab.campaign.engine.journal import JOURNAL_FILE
from moediag.lab.launch.hosts import Hosts
from moediag.lab.pipeline.trials import TrialOptions, in_order
from moediag.lab.scenario.plan import Plan
from moediag.lab.stacks import environment
from moediag.launch.settings import LaunchOptions
from moediag.records import dataclass
from moediag.report import page
from moediag.result import RunResult

HOSTS_FOLDER = "hosts"
TRACEBACK_FILE = "traceback.txt"


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run ended."""

    result: RunResult | None
    exit_code: int
    """The exit code of `moediag run` of this scenario alone."""
    problem: str
    """Why there is no result, or no complete one."""
    seconds: float


class Runs:
    """Runs scenarios one after the other; the host of a release imports once. Call :meth:`close`
    at the end."""

    def __init__(self, folder: Path, launch: LaunchOptions) -> None:
        """``folder``: of the campaign, for the logs of the hosts."""
        self._launch = launch
        self._hosts = Hosts(folder / HOSTS_FOLDER, launch)

    def prepare(self, plan: Plan) -> None:
        """Starts the host that ``plan`` needs first if its environment is built. It imports while
        the present run waits for its ranks."""
        first = in_order(plan)[0]
        with contextlib.suppress(MoediagError):  # its own run fails again and reports it
            stack = environment.ready(first.stack) if first.trial.launcher == "fork" else None
            if stack is not None:
                self._hosts.begin(stack)

    def run(self, plan: Plan, below: Path, display: Display) -> Ran:
        """Runs ``plan`` in the run directory ``below``, or resumes it there, and reports any
        outcome. Raises Interrupted, and DiskFull or OSError if the disk is full."""
        begun = time.monotonic()
        code, problem, result = int(ExitCode.OK), "", None
        try:
            resumed = (below / JOURNAL_FILE).exists()
            asked = runner.header(plan, self._launch)
            with opened(asked, below, resumed, plan.scenario.name) as journal:
                options = TrialOptions(self._launch, self._hosts.launcher)
                result = runner.run(plan, journal, options, display)
            code, problem = page.exit_code(result), result.incomplete
        except (Interrupted, DiskFull):
            raise
        except MoediagError as error:
            code, problem = error.exit_code, error.message
        except Exception as error:
            if disk_trouble(error):
                raise  # the next runs would fail the same way
            code = ExitCode.BUG
            problem = f"a bug in moediag: {type(error).__name__}: {error} ({TRACEBACK_FILE})"
            below.mkdir(parents=True, exist_ok=True)
            (below / TRACEBACK_FILE).write_text(traceback.format_exc(), encoding="utf-8")
        return Ran(result, code, problem, round(time.monotonic() - begun, 1))

    def stop(self) -> None:
        """Does nothing: the only run that runs is in the main thread, which Ctrl-C reaches."""

    def close(self) -> None:
        self._hosts.close()
