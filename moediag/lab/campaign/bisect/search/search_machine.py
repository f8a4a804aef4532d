"""A search as a pure function of the known verdicts, replayed from its beginning each time.

A subclass writes its search as plain sequential code that *asks*. If an answer is unknown, the
replay stops there, and that is the next question. So the answer depends on the known verdicts
alone, not on how many probes run at once or the order in which they finish. A search is resumed by
giving it the known verdicts again.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from moediag.lab.campaign.bisect.probe_verdict import BAD, GOOD, ProbeVerdict

Q = TypeVar("Q", bound=Hashable)
A = TypeVar("A")

# ask(question, chance): ``chance`` that the verdict is BAD, which orders the questions in advance.
Ask = Callable[[Q, float], ProbeVerdict]


class _Open(Exception):
    """The replay needs an unknown verdict."""

    def __init__(self, question: Hashable, chance: float) -> None:
        super().__init__(question)
        self.question = question
        self.chance = chance


class Machine(ABC, Generic[Q, A]):
    """``next(k)`` -> questions, ``told(question, verdict)``, ``answer`` -> A or None."""

    def __init__(self) -> None:
        self._known: dict[Q, ProbeVerdict] = {}
        self._path: list[Q] = []
        self._answer: A | None = None
        self._open: _Open | None = None  # where the replay stopped
        self._stale = True

    @abstractmethod
    def _decide(self, ask: Ask[Q]) -> A:
        """Runs the whole search from its beginning; deterministic; asks through ``ask``."""

    @abstractmethod
    def _check(self, question: Q) -> None:
        """Raises ValueError for a question that is not part of this search."""

    @property
    def known(self) -> Mapping[Q, ProbeVerdict]:
        return self._known

    @property
    def path(self) -> tuple[Q, ...]:
        """Returns the questions that the search needed, in order, without the other known ones."""
        self._replay()
        return tuple(self._path)

    @property
    def answer(self) -> A | None:
        """Returns the answer, or None while a question is open."""
        self._replay()
        return self._answer

    def told(self, question: Q, verdict: ProbeVerdict) -> None:
        """Records a verdict, in any order, also of a question never asked. A repeated verdict
        changes nothing; a different one for the same question raises ValueError."""
        self._check(question)
        if self._known.setdefault(question, verdict) != verdict:
            raise ValueError(
                f"{question} was told {self._known[question].kind}, and now {verdict.kind}"
            )
        self._stale = True

    def next(self, k: int = 1) -> list[Q]:
        """Returns up to ``k`` different open questions; empty once there is an answer.

        The search waits for the first. It will probably need the others next, whatever the first
        says: run them in parallel, or only prepare them. Three at once quarter the range. A
        question stays in the list while its probe runs.
        """
        if k < 1:
            raise ValueError(f"k is {k}: at least 1")
        wanted: list[Q] = []
        # Suppositions, the most probable first; the number breaks ties in order of creation.
        todo: list[tuple[float, int, dict[Q, ProbeVerdict]]] = [(-1.0, 0, {})]
        number = 0
        for _ in range(8 * k + 8):  # enough: two suppositions a question
            if not todo or len(wanted) == k:
                break
            weight, _, supposed = heapq.heappop(todo)
            stop = self._stop(supposed)
            if stop is None:
                continue
            question: Q = stop.question  # type: ignore[assignment]
            if question not in wanted:
                wanted.append(question)
            for verdict, chance in ((BAD, stop.chance), (GOOD, 1 - stop.chance)):
                number += 1
                item = (weight * chance, number, {**supposed, question: verdict})
                heapq.heappush(todo, item)
        return wanted

    def _stop(self, supposed: Mapping[Q, ProbeVerdict]) -> _Open | None:
        """Returns where the replay stops with ``supposed`` known as well; None: it has an
        answer."""
        if not supposed:
            self._replay()
            return self._open
        try:
            self._walk({**self._known, **supposed})
        except _Open as stop:
            return stop
        return None

    def _walk(self, known: Mapping[Q, ProbeVerdict], path: list[Q] | None = None) -> A:
        def ask(question: Q, chance: float) -> ProbeVerdict:
            if question not in known:
                raise _Open(question, chance)
            if path is not None:
                path.append(question)
            return known[question]

        return self._decide(ask)

    def _replay(self) -> None:
        if not self._stale:
            return
        path: list[Q] = []
        self._answer = self._open = None
        try:
            self._answer = self._walk(self._known, path)
        except _Open as stop:
            self._open = stop
        self._path = list(dict.fromkeys(path))
        self._stale = False
