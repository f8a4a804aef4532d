"""The search as a strategy of the engine: chooses the next release and records its verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence

from moediag.errors import MoediagError
from moediag.lab.campaign.bisect.probe_verdict import Kind, ProbeVerdict
from moediag.lab.campaign.bisect.prober import Prober, probe
from moediag.lab.campaign.bisect.question import Question
from moediag.lab.campaign.bisect.search.rates import Rate
from moediag.lab.campaign.bisect.search.search import Probe, Search, most_probes
from moediag.lab.campaign.bisect.state import State
from moediag.lab.campaign.bisect.timeline import (
    ProbeRecord,
    probe_line,
    probe_name,
    target_lines,
    timeline,
)
from moediag.lab.campaign.engine import Display, Line, Strategy
from moediag.lab.campaign.engine import drive as run_strategy
from moediag.lab.campaign.engine.drive import AHEAD
from moediag.lab.campaign.executors import Maker
from moediag.result import wording


def drive(
    question: Question, state: State, prober: Maker[Prober], display: Display, jobs: int = 1
) -> Search:
    """Probes until there is an answer; returns the search that has it.

    The answer depends neither on ``jobs`` nor on interruptions. Raises Interrupted after Ctrl-C,
    with the command that resumes it, and MoediagError if nothing can be probed.
    """
    try:
        return _drive(question, state, prober, display, jobs)
    finally:
        prober.close()


def _drive(
    question: Question, state: State, prober: Maker[Prober], display: Display, jobs: int
) -> Search:
    releases = state.releases
    most = most_probes(len(releases), question.options(releases, Rate()))
    title = f"{question.scenario.name}: {question.package}, at most {wording.plural(most, 'probe')}"
    display.begin(title, None, [p.seconds for p in state.probes], jobs, most)
    if state.target is None:
        run_strategy(_Learning(question, state, prober, display), state.journal, display)
    strategy = _Searching(with_end(question, state), state, prober, display)
    run_strategy(strategy, state.journal, display, jobs)
    return strategy.search


def with_end(question: Question, state: State) -> Question:
    """Returns the question with the bad end that showed the failure."""
    if state.target is None:
        return question
    # The failure was learned from the first probe that showed it.
    shown = (r.version for r in state.records.values() if r.verdict.kind == Kind.BAD)
    found = next(shown, None) or _next_end(question, state) or question.bad
    return dataclasses.replace(question, bad=found)


def _next_end(question: Question, state: State) -> str | None:
    """Returns the release that is tried next as the bad end, or None if no other can be.

    The failure may have ended soon after the family appeared, so after growing steps the gap
    between a release that lacks the family and one that is good is halved."""
    tried = {}
    for version in question.ends:
        told = state.probe(version)
        if told is None:
            return version
        if not _elsewhere(question, told):
            return None
    if question.asked.bad:
        return None
    for place, version in enumerate(state.releases):
        if (told := state.probe(version)) is not None:
            if not _elsewhere(question, told):
                return None
            tried[place] = told.kind
    for low, high in itertools.pairwise(tried):
        if high - low > 1 and {tried[low], tried[high]} == {Kind.SKIP, Kind.GOOD}:
            return state.releases[(low + high) // 2]
    return None


def _elsewhere(question: Question, told: ProbeVerdict) -> bool:
    """Whether the failure may be in other releases than one with this verdict."""
    changed = bool(question.scenario.overrides)
    return told.kind == Kind.SKIP or (told.kind == Kind.GOOD and changed)


class _Learning(Strategy[Probe, ProbeRecord]):
    """The first probe, of the bad end. It learns the target failure. If the scenario's own release
    cannot show it, others are tried."""

    def __init__(
        self, question: Question, state: State, prober: Maker[Prober], display: Display
    ) -> None:
        self.question = question
        self.state = state
        self.prober = prober
        self.display = display
        self.records = state.records
        self.search = _search(question, state)
        self.problem = ""

    def wanted(self, most: int) -> Sequence[Probe]:
        if self.state.target is not None:
            return []
        if not self.search.known:
            return self.search.next(most)  # the bad end, and what probably comes next
        version = None if self.state.passing else _next_end(self.question, self.state)
        if version is not None:
            return [Probe(self.state.releases.index(version))]
        if self.problem:
            self.display.say(self.problem)
            self.problem = ""
        return []

    def name(self, item: Probe) -> str:
        return probe_name(self.state.releases[item.index], item.attempt)

    def make(self, item: Probe) -> ProbeRecord:
        version = self.state.releases[item.index]
        found = probe(self.prober, self.question.setting(version), item.attempt, None)
        if found.target is None:
            self.problem = found.problem
        else:  # record it before its probe: without a target a probed bad end is not bad
            self.state.learned(found.target)
            for text in target_lines(found.target):
                self.display.say(text)
        return found.record

    def keeps(self, value: ProbeRecord) -> bool:
        return value.lasting

    def taken(self, item: Probe, value: ProbeRecord) -> None:
        if not value.lasting:
            self.state.passing.append(value)
        self.search.told(item, value.verdict)
        self.display.summary(timeline(self.state.releases, self.search.verdicts))

    def prepare(self, coming: Sequence[Probe]) -> None:
        with contextlib.suppress(MoediagError):  # the probe fails again and reports it
            versions = (self.state.releases[one.index] for one in coming[:AHEAD])
            settings = [self.question.setting(version) for version in versions]
            self.prober.here.prepare(settings, hosts=self.prober.remote is None)

    def stop(self) -> None:
        self.prober.stop()

    def line(self, value: ProbeRecord) -> Line:
        target = self.state.target
        return probe_line(value, target.signatures if target else ())

    def done(self) -> str:
        return self.state.done()


class _Searching(_Learning):
    """The other probes, until the search has its answer."""

    def wanted(self, most: int) -> Sequence[Probe]:
        target = self.state.target
        if target is None or self.search.answer is not None:  # None: the bad end is not bad
            return []
        end = Probe(self.question.options(self.state.releases, Rate()).bad)
        if end not in self.search.known:  # killed between learning and recording
            return [end]
        return self.search.next(most)

    def make(self, item: Probe) -> ProbeRecord:
        assert self.state.target is not None
        version = self.state.releases[item.index]
        setting = self.question.setting(version)
        return probe(self.prober, setting, item.attempt, self.state.target).record


def _search(question: Question, state: State) -> Search:
    rate = state.target.rate if state.target else Rate()
    search = Search(len(state.releases), question.options(state.releases, rate))
    state.tell(search)
    return search
