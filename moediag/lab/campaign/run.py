"""`moediag run`: the trials of one plan, and their judgement."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import moediag
from moediag import hardware
from moediag.errors import Interrupted
from moediag.lab.campaign.engine.display import Display, Line
from moediag.lab.campaign.engine.drive import Strategy, drive
from moediag.lab.campaign.engine.journal import Header, Journal, Records
from moediag.lab.campaign.prebuild import Ahead
from moediag.lab.judgement import conclude, together, training_tables, with_ratios, with_regressions
from moediag.lab.pipeline.trials import Reference, TrialOptions, Trials, in_order
from moediag.lab.scenario.plan import Plan, PlannedTrial
from moediag.lab.stacks import environment
from moediag.lab.stacks.environment import Stack
from moediag.launch.settings import LaunchOptions
from moediag.protocol import CostTask
from moediag.result import RunResult, TrialResult, Verdict, wording
from moediag.result.result_file import trial_from_json
from moediag.result.run_result import SCENARIO_FILE


def header(plan: Plan, launch: LaunchOptions, command: Sequence[str] = ()) -> Header:
    """Returns the question of a run of ``plan``."""
    trials = [p.trial for p in plan.trials]
    stacks = [", ".join(f"{k} {v}" for k, v in p.stack.items()) for p in plan.trials]
    return Header(
        "run",
        {
            "scenario": plan.scenario.name,
            "trials": [t.name for t in trials],
            "number of ranks": sorted({t.world_size for t in trials}),
            "backend": sorted({t.backend + " on shared GPUs" * t.shared_gpu for t in trials}),
            "launcher": sorted({t.launcher for t in trials}),
            "timeout": sorted({t.timeout for t in trials}),
            "stacks": list(dict.fromkeys(stacks)),
            "overrides": list(plan.overrides),
            "quiescence": launch.quiescence,
        },
        {f"the scenario {plan.scenario.name}": digest(plan)},
        {"started": datetime.now(timezone.utc).isoformat(timespec="seconds")},
        tuple(command),
    )


def digest(plan: Plan) -> str:
    """Returns the digest of the scenario as it runs, overrides included."""
    return hashlib.sha256(plan.scenario.identity().encode()).hexdigest()[:16]


def run(plan: Plan, journal: Journal, options: TrialOptions, display: Display) -> RunResult:
    """Runs every trial of ``plan`` that is not in ``journal`` and writes ``result.json`` beside it.

    Raises MoediagError if nothing could run, Interrupted after Ctrl-C (finished trials are in
    ``result.json``).
    """
    folder = journal.folder
    (folder / SCENARIO_FILE).write_text(plan.scenario.to_yaml(), encoding="utf-8")
    ahead = Ahead()
    references = _References(journal)
    given = options.ensure or environment.ensure

    def ensure(request: Mapping[str, str], progress: Callable[[str, float | None], None]) -> Stack:
        stack = given(request, progress)
        ahead.end(_label(request))  # a build must not import during a trial
        return stack

    alone = options.ensure is not None or options.launch.nnodes > 1
    options = dataclasses.replace(options, ensure=ensure)
    with contextlib.closing(ahead), Trials(plan, folder, options, display, references) as trials:
        strategy = _Run(plan, journal, trials, None if alone else ahead)
        earlier = [result.seconds.total for result in strategy.records.values()]
        size = len(plan.trials)
        timed = sum(isinstance(p.trial.task, CostTask) for p in plan.trials)
        title = f"{plan.scenario.name}: {wording.plural(size, 'trial')}"
        title += f", the last {timed} to time the fixes (--no-cost omits them)" if timed else ""
        display.begin(title, size, earlier)
        try:
            drive(strategy, journal, display)
        except Interrupted as error:
            if options.launch.nnodes == 1:
                raise
            raise Interrupted(
                error.message,
                "Nothing is left running. A run on several nodes cannot be resumed: type the "
                "command again on each node, with another --out and another --shared.",
            ) from error
    assert strategy.result is not None
    if trials.launch_errors and len(trials.launch_errors) >= len(strategy.results):
        raise trials.launch_errors[0]  # nothing ran at all: raise the reason
    return strategy.result


class _References:
    """The computed references. Only successful and not-applicable ones are recorded; a resumed run
    tries the others again."""

    def __init__(self, journal: Journal) -> None:
        folder = journal.folder

        def read(value: dict[str, Any]) -> Reference:
            verdict = Verdict(value["verdict"]) if value["verdict"] else None
            return Reference(folder / value["file"], verdict, value["reason"])

        def write(reference: Reference) -> dict[str, Any]:
            verdict = str(reference.verdict) if reference.verdict else ""
            return {"file": reference.path.name, "verdict": verdict, "reason": reference.reason}

        self._records = Records(journal, "reference", read, write)
        self._failed: dict[str, Reference] = {}

    def get(self, name: str) -> Reference | None:
        return self._records.get(name) or self._failed.get(name)

    def add(self, name: str, value: Reference) -> None:
        if value.verdict == Verdict.INCONCLUSIVE:
            self._failed[name] = value
        else:
            self._records.add(name, value)


class _Run(Strategy[str, TrialResult]):
    """An item is the name of a trial. ``ahead``: None to prepare nothing in advance."""

    def __init__(self, plan: Plan, journal: Journal, trials: Trials, ahead: Ahead | None) -> None:
        self.plan = plan
        self.folder: Path = journal.folder
        self.started = str(journal.header.kept.get("started", ""))
        self.trials = trials
        self.ahead = ahead
        self.begun = False
        self.planned = {p.trial.name: p for p in in_order(plan)}
        self.records = Records(journal, "trial", trial_from_json, TrialResult.to_json)
        self.results = {name: self.records[name] for name in self.planned if name in self.records}
        self.result: RunResult | None = None

    def wanted(self, most: int) -> list[str]:
        return [name for name in self.planned if name not in self.results][:most]

    def name(self, item: str) -> str:
        return item

    def make(self, item: str) -> TrialResult:
        return self.trials.run(self.planned[item])

    def keeps(self, value: TrialResult) -> bool:
        """Whether it is final: a trial that never ran says something about this machine only."""
        return bool(value.evidence)

    def taken(self, item: str, value: TrialResult) -> None:
        self.results[item] = value

    def prepare(self, coming: Sequence[str]) -> None:
        """Prepares the next environment and host, unless a trial is timed and needs the machine."""
        if self.ahead is None:
            return
        now = self.planned[self.wanted(1)[0]].stack
        if not self.begun:
            self.begun = True
            self._begin_hosts()
        for planned in map(self.planned.__getitem__, coming):
            if isinstance(planned.trial.task, CostTask):
                self.ahead.close()
            elif planned.stack != now and not self.trials.warm(planned):
                self.ahead.build(_label(planned.stack), planned.stack)

    def _begin_hosts(self) -> None:
        """Starts one host per core at once: imports take a core each, and a host that imports
        during a trial slows its ranks."""
        first: dict[str, PlannedTrial] = {}
        for planned in map(self.planned.__getitem__, self.wanted(len(self.planned))):
            first.setdefault(_label(planned.stack), planned)
        for planned in list(first.values())[: hardware.cores()]:
            self.trials.warm(planned)

    def line(self, value: TrialResult) -> Line:
        return Line(outcome(value), value.met, value.seconds.total)

    def done(self) -> str:
        return f"{len(self.results)} of {wording.plural(len(self.planned), 'trial')}"

    def write(self, incomplete: str) -> None:
        results = [self.results[name] for name in self.planned if name in self.results]
        trials = with_ratios(self.plan, results, self.folder)
        trials = with_regressions(self.plan, trials)
        trials, tables = together(trials)
        conclusion = conclude(trials)
        if incomplete:  # an untried fix may be cheaper
            conclusion = dataclasses.replace(conclusion, cheapest_correct_fix=None)
        self.result = RunResult(
            scenario=self.plan.scenario.name,
            started=self.started,
            moediag_version=moediag.__version__,
            machine=hardware.machine(),
            trials=trials,
            conclusion=conclusion,
            overrides=tuple(self.plan.overrides),
            incomplete=incomplete,
            tables=(*training_tables(self.plan, trials, self.folder), *tables),
        )
        self.result.write(self.folder)


def _label(request: Mapping[str, str]) -> str:
    return repr(sorted(request.items()))


def outcome(result: TrialResult) -> str:
    """Returns ``unfixed: collective-mismatch, culprit rank 1 (0.9 s)``."""
    text = f"{result.variant}: {result.verdict}"
    if result.culprits:
        text += f", culprit {wording.ranks(result.culprits)}"
    if not result.met:
        text += f", expected {result.expected}"
    if result.seconds.total is not None:
        text += f" ({wording.seconds(result.seconds.total)})"
    return text
