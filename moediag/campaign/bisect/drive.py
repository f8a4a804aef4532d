"""The loop: asks the search what to probe, has it probed, writes down what came of it.

A finished probe is in the state file before anything else happens, so whatever ends this loses
only the probes at work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from moediag.campaign.bisect.prober import Prober
from moediag.campaign.bisect.progress import Watcher
from moediag.campaign.bisect.question import Question
from moediag.campaign.bisect.search.rates import Rate
from moediag.campaign.bisect.search.search import Probe, Search
from moediag.campaign.bisect.signature_match import Target
from moediag.campaign.bisect.state import State
from moediag.campaign.bisect.timeline import ProbeRecord
from moediag.errors import Interrupted

AHEAD = 2  # next midpoints whose environments are built meanwhile


def drive(
    question: Question, state: State, prober: Prober, watcher: Watcher, jobs: int = 1
) -> Search:
    """Until there is an answer; returns the search that has it.

    The answer depends neither on ``jobs`` nor on how often this was interrupted. Raises Interrupted
    after Ctrl-C, naming the command that goes on, and MoediagError where nothing can be probed.
    """
    with resumable(state, prober):
        return _Drive(question, state, prober, watcher, jobs).run()


@contextlib.contextmanager
def resumable(state: State, prober: Prober) -> Iterator[None]:
    """What is done inside can be gone on with after Ctrl-C; at the end ``prober`` is closed."""
    try:
        yield
    except (KeyboardInterrupt, Interrupted):
        count = len(state.probes) + len(state.stored.extras)
        raise Interrupted(
            f"interrupted after {count} finished probe{'' if count == 1 else 's'}; "
            f"they are in {state.path}",
            f"To go on: {state.resume_command}",
        ) from None
    finally:
        prober.close()


class _Drive:
    def __init__(
        self, question: Question, state: State, prober: Prober, watcher: Watcher, jobs: int
    ) -> None:
        self.question = question
        self.state = state
        self.prober = prober
        self.watcher = watcher
        self.jobs = jobs
        self.versions = state.stored.header.releases

    def run(self) -> Search:
        self.watcher.resumed(self.state.probes)
        if self.state.stored.target is not None:
            self.watcher.learned(self.state.stored.target)
        elif not self.state.probes:
            self._learn()
        target = self.state.stored.target
        search = self._search()
        if target is None:  # the bad end is not bad: there is nothing to search
            return search
        end = Probe(self.question.options(self.versions, Rate()).bad)
        if end not in search.known:  # killed between learning and writing it down
            self._take(search, end, self._probe(end, target))
        with _crew(self.jobs, lambda probe: self._probe(probe, target), self.prober.stop) as crew:
            while search.answer is None:
                wanted = search.next(self.jobs + AHEAD)
                for probe in wanted[: self.jobs]:
                    crew.begin(probe)
                self._prepare(wanted[self.jobs :])
                for probe, record in crew.finished():
                    self._take(search, probe, record)
        return search

    def _search(self) -> Search:
        target = self.state.stored.target
        rate = target.rate if target else Rate()
        search = Search(len(self.versions), self.question.options(self.versions, rate))
        self.state.stored.tell(search)
        return search

    def _learn(self) -> None:
        first, *others = self._search().next(1 + AHEAD)
        version = self.versions[first.index]
        self._prepare(others)
        self.watcher.probing(version, 1)
        found = self.prober.learn(version)
        if found.target is not None:
            self.state.learned(found.target)
            self.watcher.learned(found.target)
        else:
            self.watcher.not_learned(found.problem)
        self.state.finished(found.record)
        self.watcher.finished(found.record)

    def _prepare(self, probes: Sequence[Probe]) -> None:
        self.prober.prepare([self.versions[probe.index] for probe in probes])

    def _probe(self, probe: Probe, target: Target) -> ProbeRecord:
        version = self.versions[probe.index]
        self.watcher.probing(version, probe.attempt)
        return self.prober.probe(version, probe.attempt, target)

    def _take(self, search: Search, probe: Probe, record: ProbeRecord) -> None:
        self.state.finished(record)
        search.told(probe, record.verdict)
        self.watcher.finished(record)


# ------------------------------------------------------------------------ several at once

Work = Callable[[Probe], ProbeRecord]


class _Alone:
    """One probe at a time, in this thread: signals reach it as they reach any run."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._begun: list[Probe] = []

    def __enter__(self) -> _Alone:
        return self

    def __exit__(self, *_: object) -> None: ...

    def begin(self, probe: Probe) -> None:
        self._begun = [probe]

    def finished(self) -> Iterator[tuple[Probe, ProbeRecord]]:
        for probe in self._begun:
            yield probe, self._work(probe)


class _Crew:
    """Up to ``jobs`` probes, each in a thread. Leaving ends those that are at work."""

    def __init__(self, jobs: int, work: Work, stop: Callable[[], None]) -> None:
        self._jobs = jobs
        self._work = work
        self._stop = stop
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="probe")
        self._running: dict[Future[ProbeRecord], Probe] = {}

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def begin(self, probe: Probe) -> None:
        """Unless it is running, or enough others are; one that is no longer wanted runs on."""
        if probe not in self._running.values() and len(self._running) < self._jobs:
            self._running[self._threads.submit(self._work, probe)] = probe

    def finished(self) -> Iterator[tuple[Probe, ProbeRecord]]:
        """Waits for at least one; raises what a probe raised, after those that ended well."""
        done = wait(self._running, return_when=FIRST_COMPLETED).done
        for future in sorted(done, key=lambda f: f.exception() is not None):
            yield self._running.pop(future), future.result()


def _crew(jobs: int, work: Work, stop: Callable[[], None]) -> _Alone | _Crew:
    return _Alone(work) if jobs == 1 else _Crew(jobs, work, stop)
