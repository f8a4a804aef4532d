"""Probes releases as jobs of an executor. Their environments are built on this machine."""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moediag.errors import Interrupted, StackError
from moediag.lab.campaign.bisect import probe
from moediag.lab.campaign.bisect.probe_verdict import skip
from moediag.lab.campaign.bisect.prober import Learned, Prober, Setting
from moediag.lab.campaign.bisect.question import Question
from moediag.lab.campaign.bisect.signature_match import Target
from moediag.lab.campaign.bisect.timeline import ProbeRecord
from moediag.lab.campaign.engine import Display
from moediag.lab.campaign.executors import Choice, Lost, Remote, build_here, opened
from moediag.lab.campaign.prebuild import Ahead
from moediag.lab.stacks import environment
from moediag.launch.settings import LaunchOptions


def prober(
    question: Question, folder: Path, display: Display, launch: LaunchOptions, executor: Choice
) -> Prober:
    """Returns the prober for an executor. ``folder``: of the bisect."""
    if executor.here:
        return probe.Releases(question, folder, display, launch)
    return Elsewhere(question, folder, display, launch, executor)


class Elsewhere:
    """A prober; each job uses :class:`~.probe.Releases` on its machine. A resumed bisect repeats
    probes whose jobs were lost."""

    def __init__(
        self, question: Question, folder: Path, display: Display, launch: LaunchOptions,
        executor: Choice,
    ) -> None:  # fmt: skip
        """See :class:`~.probe.Releases`."""
        work = functools.partial(probe.Releases, question, folder.resolve(), Display(), launch)
        self._releases = pickle.dumps(work)
        self._requests = {r.version: functools.partial(question.request, r)
                          for r in question.releases}  # fmt: skip
        self._folder = folder
        self._display = display
        self._executor = executor
        self._ahead = Ahead()
        self._lock = threading.Lock()
        self._engine = contextlib.ExitStack()
        self._connected: Remote | None = None
        self._stopped = False

    def learn(self, version: str) -> Learned:
        self._build(version)
        try:
            learned: Learned = self._job(version, "learn", version)
        except Lost as lost:
            record = _not_made(version, 1, lost)
            return Learned(record, None, record.verdict.text)
        return learned

    def probe(self, version: str, attempt: int, target: Target) -> ProbeRecord:
        self._build(version)
        return self._probed("probe", version, attempt, version, target)

    def probe_on(self, setting: Setting, attempt: int, target: Target) -> ProbeRecord:
        self._ahead.end(setting.name)
        build_here(setting.requests[:1], functools.partial(self._building, setting.name))
        return self._probed("probe_on", setting.name, attempt, setting, target)

    def prepare(self, versions: Sequence[str]) -> None:
        for version in versions:
            with contextlib.suppress(StackError):
                self._begin(version, self._requests[version]())

    def prepare_on(self, settings: Sequence[Setting]) -> None:
        for setting in settings:
            with contextlib.suppress(StackError):
                self._begin(setting.name, setting.requests[0])

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._connected is not None:
                self._connected.stop()

    def close(self) -> None:
        self._ahead.close()
        self._engine.close()
        self._connected = None
        self._stopped = False

    def _probed(
        self, method: str, name: str, attempt: int, what: str | Setting, target: Target
    ) -> ProbeRecord:
        try:
            record: ProbeRecord = self._job(name, method, what, attempt, target)
        except Lost as lost:
            return _not_made(name, attempt, lost)
        return record

    def _job(self, name: str, method: str, *arguments: Any) -> Any:
        self._display.doing(name, f"as a job of {self._executor.kind}")
        return self._remote(name).on_maker(name, self._releases, method, *arguments)

    def _remote(self, name: str) -> Remote:
        with self._lock:
            if self._stopped:
                raise Interrupted(f"stopped before {name}")
            if self._connected is None:
                choice = opened(self._executor, self._folder, self._display.say)
                self._connected = self._engine.enter_context(choice)
            assert self._connected is not None, "an executor of this machine"
            return self._connected

    def _build(self, version: str) -> None:
        self._ahead.end(version)
        with contextlib.suppress(StackError):  # the job fails for the same reason
            build_here([self._requests[version]()], functools.partial(self._building, version))

    def _building(self, name: str, text: str, fraction: float | None) -> None:  # noqa: ARG002
        self._display.doing(name, text)

    def _begin(self, name: str, request: Mapping[str, str]) -> None:
        if environment.ready(request) is None:
            self._ahead.build(name, request)


def _not_made(name: str, attempt: int, lost: Lost) -> ProbeRecord:
    return ProbeRecord(name, skip(str(lost)), attempt, lasting=False)
