"""Runs the jobs of a night on the workers of an executor."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path

from moediag.errors import ExitCode
from moediag.lab.campaign.engine import Display
from moediag.lab.campaign.executors import Lost, Remote, build_here
from moediag.lab.campaign.sweep.shared_runs import Ran, Runs
from moediag.lab.scenario.plan import Plan
from moediag.launch.settings import LaunchOptions


class Elsewhere(Runs):
    """Each job uses :class:`Runs` on its machine. Environments are built here."""

    def __init__(self, folder: Path, launch: LaunchOptions, remote: Remote) -> None:
        """``launch``: without ``stop``, which cannot be sent."""
        self._runs = pickle.dumps(functools.partial(Runs, folder.resolve(), launch))
        self._remote = remote

    def run(self, plan: Plan, below: Path, display: Display) -> Ran:
        name = below.parent.name + " " + below.name
        requests = {tuple(sorted(p.stack.items())): p.stack for p in plan.trials}
        build_here(requests.values(), lambda text, _: display.doing(name, text))
        try:
            ran: Ran = self._remote.on_maker(
                name, self._runs, "run", plan, below.resolve(), Display()
            )
        except Lost as lost:
            return Ran(None, ExitCode.INCONCLUSIVE, str(lost), 0.0)
        return ran

    def stop(self) -> None:
        self._remote.stop()

    def close(self) -> None:
        """Does nothing: the executor ends its workers."""
